"""Experts on several processes: one torchrun line, on CPUs (gloo) or GPUs (NCCL).

    torchrun --nproc-per-node 2 examples/expert_parallel.py

Each process holds half of the experts and its own tokens. Shows how many tokens travel, that the loss
falls, and that outputs are those of the same layer in one process. Without torchrun it runs as one rank.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from multigemm.nn import MoE
from multigemm.nn.parallel import ExpertParallel

EXPERTS, WIDTH, HIDDEN, TOP, STEPS = 8, 32, 64, 2, 40


def main() -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("ep",))

    torch.manual_seed(0)
    whole = MoE(WIDTH, HIDDEN, EXPERTS, TOP).to(device)
    moe = MoE(WIDTH, HIDDEN, EXPERTS, TOP, fused=True).to(device)
    moe.load_state_dict(whole.state_dict())
    parallelize_module(moe, mesh["ep"], {"experts": ExpertParallel()})

    torch.manual_seed(1 + rank)
    x = torch.randn(50 + 30 * rank, WIDTH, device=device)
    with torch.no_grad():
        difference = (moe(x) - whole(x)).abs().max().item()
        elsewhere = (moe.route(x)[1] // -(-EXPERTS // ranks) != rank).any(1).float().mean().item()
    print(f"rank {rank} of {ranks}: {len(x)} tokens, of which {100 * elsewhere:.0f}% travel; "
          f"difference to one process {difference:.1e}", flush=True)  # fmt: skip
    assert difference < 1e-5

    optimizer = torch.optim.Adam(moe.experts.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = (moe(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps", flush=True)
    assert losses[-1] < 0.7 * losses[0]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
