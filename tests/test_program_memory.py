"""What the compiler says of memory is checked before step 0."""

from __future__ import annotations

import jax
import pytest

from tests.tiny_chunks import CONFIG, SHAPES
from train.program_memory import bytes_on_device, check_program_memory
from train.programs import Programs, compile_programs
from train.state import make_optimizer


@pytest.fixture(scope="module")
def programs() -> Programs:
    return compile_programs(CONFIG, make_optimizer(total_steps=5), SHAPES, devices=jax.devices()[:1])


def test_needs_hold_what_stays_on_the_device(programs: Programs) -> None:
    params = bytes_on_device(programs.abstract_state.params)
    opt_state = bytes_on_device(programs.abstract_state.opt_state)
    assert params == 4 * CONFIG.num_parameters
    assert 2 * params <= opt_state < 2.01 * params
    needs = check_program_memory(programs)
    assert set(needs) == {
        *(f"{what} a chunk of {rows} x 16 tokens" for what in ("training on", "evaluating") for rows in (1, 2)),
        "the update",
    }
    for rows in (1, 2):
        assert needs[f"training on a chunk of {rows} x 16 tokens"] > opt_state + 2 * params  # gradients besides
    assert needs["training on a chunk of 2 x 16 tokens"] > needs["training on a chunk of 1 x 16 tokens"]
    assert needs["the update"] > opt_state + 2 * params


def test_the_program_that_does_not_fit_is_named_with_a_remedy(programs: Programs) -> None:
    needs = check_program_memory(programs)
    largest = max(needs.values())
    assert check_program_memory(programs, budget_bytes=largest) == needs
    with pytest.raises(
        ValueError, match=r"training on a chunk of 2 x 16 tokens needs .* GiB, the device has .* smaller"
    ):
        check_program_memory(programs, budget_bytes=largest - 1)
