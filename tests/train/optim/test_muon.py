"""Muon: orthogonal steps for the matrices of blocks, AdamW's for the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import vit_scale
from vit_scale.checkpoints.reader import Checkpoint
from vit_scale.checkpoints.writer import CheckpointFolder
from vit_scale.config import OptimConfig
from vit_scale.strategies.replicated import PlainEngine
from vit_scale.train.optim.muon import Muon, orthogonal, orthogonal_together
from vit_scale.train.optim.optimizer import build_optimizer, parameter_groups
from vit_scale.train.state import TrainState


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 6, 6)])
def test_directions_are_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    cosine = torch.nn.functional.cosine_similarity(orthogonal(matrices).flatten(1), (u @ vh).flatten(1))
    assert cosine.min() > 0.97


def matrices_alike() -> torch.Tensor:
    return torch.randn(4, 8, 20, generator=torch.Generator().manual_seed(0))


def orthogonal_in_one_of_three(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=3)
    torch.save(orthogonal_together(matrices_alike()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_work_is_split_between_ranks_and_all_have_the_result(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(orthogonal_in_one_of_three, (str(tmp_path),), nprocs=3)
    alone = orthogonal_together(matrices_alike())
    assert torch.equal(alone, orthogonal(matrices_alike()))
    for rank in range(3):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), alone)


def test_step_consists_of_decay_momentum_and_direction() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(12, 20))
    ours = Muon([{"params": [weight], "matrices": True, "weight_decay": 0.1}], lr=0.02)
    expected, buffer = weight.detach().clone(), torch.zeros(12, 20)
    for _ in range(3):
        weight.grad = torch.randn(12, 20)
        buffer = 0.95 * buffer + 0.05 * weight.grad
        direction = orthogonal((0.05 * weight.grad + 0.95 * buffer)[None])[0]
        expected = expected * (1 - 0.02 * 0.1) - 0.02 * 0.2 * 20**0.5 * direction
        ours.step()
    torch.testing.assert_close(weight.detach(), expected)


def test_other_parameters_take_adamw_steps() -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    muon = Muon([{"params": [ours], "weight_decay": 0.1}], lr=0.01)
    adamw = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    for _ in range(4):
        ours.grad = torch.randn(5)
        theirs.grad = ours.grad.clone()
        muon.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs)


def test_only_matrices_of_blocks_are_orthogonalized() -> None:
    model = vit_scale.create_model("vit_mu", num_classes=3)
    groups = parameter_groups(model, OptimConfig(name="muon", lr=0.02, adamw_lr=0.003))
    names = {id(p): name for name, p in model.named_parameters()}
    chosen = {names[id(p)] for group in groups if group.get("matrices") for p in group["params"]}
    kinds = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert chosen == {f"blocks.{i}.{kind}.weight" for i in range(model.depth) for kind in kinds}
    assert [group["lr_scale"] for group in groups if not group.get("matrices")] == pytest.approx([0.15] * 2)


def test_loss_decreases() -> None:
    torch.manual_seed(0)
    model = vit_scale.create_model("vit_mu", num_classes=3)
    images, labels = torch.randn(12, 3, *model.img_size), torch.arange(12) % 3
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=0.01, adamw_lr=0.003, momentum=0.95))
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < 1.0 < losses[0]


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    state, other = fresh_state(seed=0), fresh_state(seed=1)
    train(state, steps=3)
    folder = CheckpointFolder(tmp_path, keep=1, rank=0, world=1, session="one")
    folder.save(state, {"plan": {}})
    folder.close()
    other.restore(Checkpoint(tmp_path / "checkpoints/step-00000003"))
    assert {len(entries) for entries in other.engine.optimizer.state.values()} == {1, 3}, "no more state than there was"
    train(state, steps=2)
    train(other, steps=2)
    for a, b in zip(state.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def fresh_state(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = vit_scale.create_model("vit_mu", num_classes=3)
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=0.01, adamw_lr=0.003))
    return TrainState(PlainEngine(model, optimizer))


def train(state: TrainState, steps: int) -> None:
    for _ in range(steps):
        torch.manual_seed(state.step)
        images = torch.randn(6, 3, *state.model.img_size)
        state.model(images).square().sum().backward()
        state.engine.optimizer.step()
        state.engine.optimizer.zero_grad()
        state.step += 1
