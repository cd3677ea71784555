"""`decode_step`'s kernel in the simulator: right in many interleavings, and with faults planted in it."""

import pytest

from jaxtaxfree import simulator
from jaxtaxfree.simulator.scheduler import POLICIES
from tests.helpers.decode_steps import Step

STEPS = {
    "one rank": Step(world=1, layers=2),
    "two ranks, two layers": Step(layers=2),
    "an empty cache and a full one": Step(lengths=(0, 19), group=1),
    "qwen 2": Step(family="qwen2-7b", world=3),
    "qwen 3": Step(family="qwen3-8b", lengths=(7,)),
    "a window": Step(family="mistral-7b-v0.1", lengths=(13,)),
    "four sequences": Step(world=1, lengths=(3, 0, 17, 9), group=1),
    "splits": Step(world=1, lengths=(19,), config=(("splits", 3),)),
    "scales and caps": Step(
        world=1,
        changes=(
            ("residual_scale", 0.5), ("logit_scale", 0.5), ("logit_soft_cap", 2.0), ("score_soft_cap", 3.0),
            ("norm_plus_one", True), ("activation", "gelu_tanh"), ("rotary_dim", 32), ("embedding_scale", 2.0),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_every_model_is_right(name):
    seed = list(STEPS).index(name)
    STEPS[name].run(seed=seed, policy=POLICIES[seed % len(POLICIES)])
