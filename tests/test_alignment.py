"""The setting of `make test-rounding` that moves parameters and inputs really moves them, and changes no number."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from alignment import at_odd_address

PROGRAM = """
import torch, zoo
from alignment import misalign_modules

model, ids = zoo.make("llama"), torch.tensor([[1, 5, 9, 20]])
before = {name: value.clone() for name, value in model.state_dict().items()}
read = []
with torch.no_grad():
    plain = model(ids).logits
    misalign_modules()
    projection = model.model.layers[0].self_attn.q_proj
    projection.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].data_ptr() % 64))
    moved = model(ids).logits
assert all(p.data_ptr() % 64 == p.element_size() for p in model.parameters())
assert read == [8]
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
torch.testing.assert_close(moved, plain, rtol=0, atol=1e-12)
"""


def test_every_parameter_is_moved_and_none_is_changed() -> None:
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_odd_address_is_off_by_one_number() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(5, 7).to(dtype)
        moved = at_odd_address(x)
        assert moved.data_ptr() % 64 == x.element_size() and torch.equal(moved, x)
