"""nanoGPT's loop: a GPT with tied weights, micro-batches, autocast and a learning rate per step."""

import math
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import shoal

VOCABULARY, BLOCK, WIDTH, HEADS, LAYERS = 65, 32, 64, 4, 2
MICRO_BATCH, ACCUMULATION, EPOCHS = 8, 4, 2
STEPS_PER_EPOCH, WARMUP, RATE = 100, 10, 1e-3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        b, t, c = x.shape
        heads = self.qkv(self.norm_1(x)).view(b, t, 3 * HEADS, c // HEADS).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight
        self.apply(self.start)

    @staticmethod
    def start(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text():
    generator = torch.Generator().manual_seed(1)
    size = STEPS_PER_EPOCH * MICRO_BATCH * ACCUMULATION
    drawn = torch.randint(1, 4, (size, BLOCK + 1), generator=generator).cumsum(1) % VOCABULARY
    return TensorDataset(drawn[:, :-1], drawn[:, 1:])


def rate_of(step):
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    share = (step - WARMUP) / (EPOCHS * STEPS_PER_EPOCH - WARMUP)
    return RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def main():
    torch.manual_seed(0)
    model = GPT()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    loader = DataLoader(text(), MICRO_BATCH * ACCUMULATION)
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(loader, epochs=EPOCHS):
            for group in optimizer.param_groups:
                group["lr"] = rate_of(batch.step)
            with session.step():
                for part in batch.parts(ACCUMULATION):
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        _, loss = model(part.inputs, part.targets)
                    session.backward(loss)
                session.clip_grad_norm(1.0)
        if session.is_first:
            torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
