"""Never compile twice: delegates that were compiled before come out of the store."""
