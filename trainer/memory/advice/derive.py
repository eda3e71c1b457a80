"""What a policy would need that was not traced, from the traces of `none` and `full` and what a block leaves behind.

Enough for a table of choices: the largest blocks' lives are those of the two traces, and what a policy keeps is known
by name. The policy that a run is configured with is always traced itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.memory.predict.moments import Prediction
from trainer.memory.predict.profile import Interval, Profile
from trainer.model.checkpointing import Attention, Full, Keep, NoCheckpointing, Selective

if TYPE_CHECKING:
    from trainer.memory.predict.planner import Planner
    from trainer.model.checkpointing import Checkpointing


def derived(planner: Planner, policy: Checkpointing) -> Prediction:
    """The step under a policy, traced only as `none` and `full`."""
    return planner.fold(policy, [_profile(planner, block) for block in policy.blocks(planner.depth)])


def _profile(planner: Planner, policy: Checkpointing) -> Profile:
    """A block's, as far as it can be told without a trace."""
    if isinstance(policy, Selective):
        full = planner.profile(Full())
        return planner.profile(policy) if full.saved is None else _keeping(full, _kept(full, policy.keep))
    if isinstance(policy, Attention):
        none = planner.profile(NoCheckpointing())
        return planner.profile(policy) if none.saved is None else _keeping(none, -none.saved.attention)
    return planner.profile(policy)


def _kept(full: Profile, keep: Keep) -> int:
    """Bytes that a selective policy keeps of a block beside its input."""
    sizes = {Keep.attention: full.saved.kernel_outputs, Keep.linear: full.saved.linear_outputs}
    return sum(size for name, size in sizes.items() if keep in (name, Keep.both))


def _keeping(profile: Profile, more: int) -> Profile:
    """The profile with `more` bytes kept by each block from its attention on, given back by its backward pass, which
    rises as high as before."""
    return replace(
        profile,
        forward=tuple(Interval(i.delta + more, i.peak + more) for i in profile.forward),
        backward=tuple(Interval(i.delta - more, i.peak) for i in profile.backward),
    )
