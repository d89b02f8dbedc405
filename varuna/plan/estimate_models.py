"""Shapes of the models that there are ready profiles for, each with where it is from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer as BERT and GPT-2 are built: learned positions, biases, MLP of 4 h, output tied to input.

    Attributes:
        name: as on the command line.
        hidden: h.
        num_layers: L.
        num_heads: a.
        sequence: s, tokens per sample.
        vocabulary: V, rows of the embedding.
        published_parameters: what its authors say, to compare with ``num_parameters``.
        bert: an encoder: token types, normalised embeddings, pooler and two heads.
        source: where the shape is from.
    """

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    sequence: int
    vocabulary: int
    published_parameters: float
    bert: bool = False
    source: str

    @property
    def layer_parameters(self) -> int:
        """12 h² + 13 h: query, key, value, output (4 h² + 4 h), MLP (8 h² + 5 h), two norms (4 h)."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def table_parameters(self) -> int:
        """V h: the embedding's table, which is the output's matrix too."""
        return self.vocabulary * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """The table and the positions; BERT adds two token types and a norm."""
        extra = 4 * self.hidden if self.bert else 0
        return self.table_parameters + self.sequence * self.hidden + extra

    @property
    def head_parameters(self) -> int:
        """Without the tied table. GPT-2: a norm. BERT: pooler, transform with norm, biases, next sentence."""
        h = self.hidden
        return 2 * h + (2 * (h * h + h) + self.vocabulary + 2 * h + 2 if self.bert else 0)

    @property
    def num_parameters(self) -> int:
        """All, the tied table once."""
        layers = self.num_layers * self.layer_parameters
        return self.embedding_parameters + layers + self.head_parameters


_MEGATRON = "Megatron-LM (arXiv:1909.08053) tables 1 and 2; vocabulary 51,200 as in its scaling runs"
_VARUNA = "training script of the Varuna paper's code (examples of github.com/microsoft/varuna)"

MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="bert-large",
            hidden=1024,
            num_layers=24,
            num_heads=16,
            sequence=512,
            vocabulary=30522,
            published_parameters=336e6,
            bert=True,
            source="BERT (arXiv:1810.04805), phase 2 of pre-training; 336 M as in Megatron-LM's README",
        ),
        ModelShape(
            name="gpt2-355m",
            hidden=1024,
            num_layers=24,
            num_heads=16,
            sequence=1024,
            vocabulary=50257,
            published_parameters=355e6,
            source="GPT-2 medium (Radford et al. 2019); 355 M as in Megatron-LM",
        ),
        ModelShape(
            name="gpt2-1.5b",
            hidden=1600,
            num_layers=48,
            num_heads=25,
            sequence=1024,
            vocabulary=50257,
            published_parameters=1.558e9,
            source="GPT-2 XL (Radford et al. 2019); 1558 M as released",
        ),
        ModelShape(
            name="gpt2-2.5b",
            hidden=1920,
            num_layers=54,
            num_heads=20,
            sequence=1024,
            vocabulary=51200,
            published_parameters=2.5e9,
            source=_MEGATRON,
        ),
        ModelShape(
            name="gpt2-8.3b",
            hidden=3072,
            num_layers=72,
            num_heads=32,
            sequence=1024,
            vocabulary=51200,
            published_parameters=8.3e9,
            source=_MEGATRON,
        ),
        ModelShape(
            name="gpt2-20b",
            hidden=4200,
            num_layers=96,
            num_heads=42,
            sequence=1024,
            vocabulary=50304,
            # The script says 20,753,384,400 and counts the tied table twice.
            published_parameters=20_753_384_400 - 50304 * 4200,
            source=_VARUNA,
        ),
        ModelShape(
            name="gpt2-200b",
            hidden=12800,
            num_layers=102,
            num_heads=100,
            sequence=1024,
            vocabulary=51200,
            published_parameters=200e9,
            source="chosen here, Megatron's proportions (128 per head): the Varuna paper trains 200 billion "
            "parameters, but its shape was not found",
        ),
    )
}
