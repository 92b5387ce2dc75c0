"""The command line of the cas artifact store: parse, call the library, render, exit."""
