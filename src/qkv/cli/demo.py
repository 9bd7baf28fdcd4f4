"""`qkv demo`."""

from __future__ import annotations

import time

import click

from qkv.cli.common import json_option, print_json


@click.command()
@click.option("--steps", default=300, show_default=True, help="How long to train.")
@json_option
def demo(steps: int, as_json: bool) -> None:
    """Train a small decoder on Python's own documentation, byte by byte, and let it write."""
    from pydoc_data.topics import topics

    import torch

    from qkv.config.run import Config
    from qkv.nn.transformer import Transformer

    config = Config.load("decoder-tiny")
    network = Transformer(config.model, generator=torch.Generator().manual_seed(0))
    length = config.model.max_seq_len
    data = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
    click.echo(f"training {sum(p.numel() for p in network.parameters()):,} parameters on {len(data):,} bytes", err=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    started, losses = time.perf_counter(), []
    for step in range(1, steps + 1):
        starts = torch.randint(0, len(data) - length, (16, 1), generator=generator)
        window = data[starts + torch.arange(length + 1)]
        output = network(window[:, :-1], labels=window[:, 1:])
        loss = output.loss_sum / output.target_count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 or step % 50 == 0:
            click.echo(f"step {step:4d}  loss {losses[-1]:.3f}  {time.perf_counter() - started:.0f} s", err=True)
    prompt = "The statement"
    ids = torch.tensor([list(prompt.encode())])
    network.eval()
    with torch.no_grad():
        cache = network.new_cache(1)
        logits = network(ids, cache=cache, logits="last")
        written: list[int] = []
        while len(written) < 100:
            written.append(int(torch.multinomial((logits[0, -1] / 0.7).softmax(-1), 1, generator=generator)))
            logits = network(torch.tensor([written[-1:]]), cache=cache, logits="last")
    text = prompt + bytes(written).decode("utf-8", "replace")
    if as_json:
        print_json({"losses": losses, "text": text, "seconds": time.perf_counter() - started})
    else:
        click.echo(text)
