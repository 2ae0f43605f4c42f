#!/usr/bin/env python3
"""Trains a small Mixture-of-Experts language model, whose experts are spread over the ranks, on the help texts of Python.

    nvte-ep launch -n 2 -- python examples/pytorch/ep_moe.py              # on the CPU; torchrun does as well
    nvte-ep launch -n 2 -- python examples/pytorch/ep_moe.py --check      # the same losses as a dense model in one process

On GPUs each rank takes the GPU of its local rank, or shares one with others where there are fewer.
"""

import argparse
import os
import pydoc_data.topics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import nvte_ep
from nvte_ep.moe import MoELayer, average_gradients

EXPERTS, TOP_K, HIDDEN, FFN, LAYERS, HEADS, CONTEXT, VOCABULARY = 8, 2, 64, 128, 2, 4, 64, 128


class DenseMoe(nn.Module):
    """The same layer without ranks: every token through its experts, all of which are here."""

    def __init__(self):
        super().__init__()
        self.router = nvte_ep.moe.Router(HIDDEN, EXPERTS, TOP_K)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FFN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN) * FFN**-0.5)

    def forward(self, tokens):
        idx, weights = self.router(tokens)
        result = torch.zeros_like(tokens)
        for slot in range(TOP_K):
            for expert in range(EXPERTS):
                rows = (idx[:, slot] == expert).nonzero().squeeze(1)
                out = F.gelu(tokens[rows] @ self.up[expert]) @ self.down[expert]
                result = result.index_add(0, rows, out * weights[rows, slot].unsqueeze(1))
        return result


class Block(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.before_attention, self.before_moe = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = moe()

    def forward(self, x):
        batch, length, _ = x.shape
        heads = [part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.before_attention(x)).chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(batch, length, HIDDEN)
        x = x + self.out(attended)
        return x + self.moe(self.before_moe(x).flatten(0, 1)).view_as(x)


class Model(nn.Module):
    def __init__(self, moe):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.blocks = nn.ModuleList(Block(moe) for _ in range(LAYERS))
        self.last, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def loss(self, text):
        """[batch, CONTEXT + 1] characters -> mean cross entropy of the next one."""
        x = self.embedding(text[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), text[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank")
    parser.add_argument("--check", action="store_true", help="compare with a dense model, for 10 steps")
    parser.add_argument("--losses", help="write the loss of every step into this file")
    arguments = parser.parse_args()

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.set_num_threads(1)
    device = torch.device("cuda" if cuda else "cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = arguments.batch * CONTEXT
    nvte_ep.ep_bootstrap(None, EXPERTS, tokens, HIDDEN, TOP_K, recv_capacity_per_rank=ranks * tokens * TOP_K + EXPERTS * 16,
                         max_token_dtype=torch.float32)

    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    text = torch.tensor([min(ord(character), VOCABULARY - 1) for character in text])
    model = Model(lambda: MoELayer(HIDDEN, FFN, TOP_K, device=device)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dense = Model(DenseMoe).to(device) if arguments.check else None
    dense_optimizer = torch.optim.AdamW(dense.parameters(), lr=3e-3) if dense else None
    losses, worst, start = [], 0.0, time.monotonic()
    for step in range(10 if arguments.check else arguments.steps):
        # Everybody draws the batch of all ranks, and takes its part.
        generator = torch.Generator().manual_seed(step)
        places = torch.randint(len(text) - CONTEXT - 1, (ranks * arguments.batch,), generator=generator)
        batch = torch.stack([text[place : place + CONTEXT + 1] for place in places.tolist()]).to(device)
        loss = model.loss(batch.view(ranks, arguments.batch, -1)[rank])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if dense:
            wanted = dense.loss(batch)
            dense_optimizer.zero_grad()
            wanted.backward()
            dense_optimizer.step()
            difference = abs(losses[-1] - wanted.item())
            worst = max(worst, difference)
            assert difference < 1e-4, f"step {step}: loss {losses[-1]}, of the dense model {wanted.item()}"
        shares = [block.moe.balance() for block in model.blocks]
        if dense:
            for block, other in zip(model.blocks, dense.blocks):
                other.moe.router.bias.copy_(block.moe.router.bias)
        if rank == 0 and (step % 10 == 0 or step == arguments.steps - 1):
            busiest = max(float(share.max()) for share in shares) * EXPERTS
            print(f"step {step:3}  loss {losses[-1]:.4f}  busiest expert {busiest:.2f} of the mean  {time.monotonic() - start:.1f} s", flush=True)
    if rank == 0:
        if arguments.losses:
            with open(arguments.losses, "w") as file:
                file.writelines(f"{loss:.6f}\n" for loss in losses)
        if dense:
            print(f"the dense model has the same losses, within {worst:.1e}")
        else:
            assert losses[-1] < losses[0] - 1 or arguments.steps < 100, "the loss does not fall"
    nvte_ep.ep_finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
