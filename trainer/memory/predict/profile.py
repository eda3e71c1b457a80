"""What a trace finds: a micro-batch by its sizes, and how memory rises and falls in each stretch of its step."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A micro-batch by its sizes."""

    lengths: tuple[int, ...]
    """tokens of each sample"""
    num_targets: int
    packed: bool

    @property
    def rows(self) -> int:
        return 1 if self.packed else len(self.lengths)

    @property
    def row_tokens(self) -> int:
        return sum(self.lengths) if self.packed else max(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Positions that are computed, padding included."""
        return self.rows * self.row_tokens

    def scaled(self, tokens: int) -> Shape:
        """About as many tokens in the same kind of row: more or fewer samples of the longest length."""
        longest = max(self.lengths)
        full, rest = divmod(max(tokens, 2), longest)
        lengths = (longest,) * full + ((rest,) if rest > 1 and self.packed else ())
        lengths = lengths or (max(tokens, 2),)
        targets = max(1, round(self.num_targets * sum(lengths) / sum(self.lengths)))
        return replace(self, lengths=lengths, num_targets=targets)


@dataclass(frozen=True)
class Interval:
    """A stretch of the step, relative to what was live at its beginning. Bytes."""

    delta: int
    """live at the end, less live at the beginning"""
    peak: int
    """most, less live at the beginning"""

    def scaled(self, factor: float, base: Interval) -> Interval:
        """base + factor x (self - base): a straight line through two readings."""
        return Interval(
            round(base.delta + factor * (self.delta - base.delta)), round(base.peak + factor * (self.peak - base.peak))
        )


@dataclass(frozen=True)
class Profile:
    """The intervals of a micro-batch with few blocks."""

    before: Interval
    """input to the first block"""
    forward: tuple[Interval, ...]
    """one a block"""
    loss: Interval
    """last block's end to the scalar"""
    loss_backward: Interval
    backward: tuple[Interval, ...]
    """one a block, in the order of the blocks"""
    depth: int
    """blocks traced"""
    whole: bool
    """the model has no known blocks: everything is in `loss` and `loss_backward`, at full depth"""
    num_tokens: int

    def at(self, tokens: int, other: Profile) -> Profile:
        """The profile at another row length, on the straight line through two profiles."""
        factor = (tokens - self.num_tokens) / (other.num_tokens - self.num_tokens)

        def line(mine, theirs):
            if isinstance(mine, tuple):
                return tuple(line(m, t) for m, t in zip(mine, theirs, strict=True))
            return theirs.scaled(factor, mine)

        names = ("before", "forward", "loss", "loss_backward", "backward")
        return replace(self, num_tokens=tokens, **{n: line(getattr(self, n), getattr(other, n)) for n in names})
