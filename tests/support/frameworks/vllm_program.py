"""Programs that a Python with vLLM runs, which may be another than the tests'.

    python vllm_program.py versions DIRECTORY SERIES NUM_VERSIONS NUM_FAILURES

Prints a line of JSON for each thing that was tried.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

PROMPTS = [[1, 5, 9, 13, 2], [40, 41, 42]]
NUM_TOKENS = 8


def say(**what: Any) -> None:
    print("told", json.dumps(what), flush=True)


def tiny_model(seed: int) -> Any:
    """A Qwen2 of 100,000 weights that a seed makes; greedy tokens of two seeds differ."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=255,
    )
    return Qwen2ForCausalLM(config).to(torch.float32).eval()


@torch.no_grad()
def expected(model: Any) -> list[list[int]]:
    """The tokens that transformers generates greedily."""
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
        found.append(tokens[len(prompt) :])
    return found


def engine(directory: Path) -> Any:
    from vllm import LLM  # noqa: PLC0415

    return LLM(
        model=str(directory),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        weight_transfer_config={"backend": "shoal"},
    )


def served(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams  # noqa: PLC0415

    sampling = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [
        list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling, use_tqdm=False)
    ]


def update(llm: Any, version: int | None, label: str) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version}})
    llm.finish_weight_update(label)


def versions(directory: str, series: str, num_versions: str, num_failures: str) -> None:
    """Install so many versions, then let as many transfers fail in three ways."""
    import shoal  # noqa: PLC0415
    from shoal_proto.errors import ShoalError  # noqa: PLC0415

    tiny_model(0).save_pretrained(directory)
    llm = engine(Path(directory))
    say(what="initial", same=served(llm) == expected(tiny_model(0)))
    llm.init_weight_transfer_engine({"init_info": {"series": series, "reader": "engine"}})
    tokens: list[list[int]] = []
    for seed in range(1, int(num_versions) + 1):
        model = tiny_model(seed)
        found = shoal.publish(series, model, step=seed).wait("committed", timeout=120)
        assert found is not None
        update(llm, found.number, str(found.number))
        tokens = served(llm)
        say(what="version", number=found.number, same=tokens == expected(model))
    bad = {name: each[:1] for name, each in tiny_model(99).state_dict().items()}
    unloadable = shoal.publish(series, bad, step=99).wait("committed", timeout=120)
    assert unloadable is not None
    kept = 0
    for attempt in range(int(num_failures)):
        number = [unloadable.number, 10_000, 1][attempt % 3]
        try:
            update(llm, number, "wrong")
        except Exception as error:  # noqa: BLE001 - any error is one; what is served counts
            is_told = isinstance(error, ShoalError) or "Shoal" in repr(error) or bool(str(error))
            kept += is_told and served(llm) == tokens
        else:
            say(what="installed", number=number)
    say(what="failures", kept=kept, of=int(num_failures), version=llm.get_weight_version())
    last = tiny_model(7)
    found = shoal.publish(series, last, step=100).wait("committed", timeout=120)
    assert found is not None
    update(llm, found.number, str(found.number))
    say(what="after", same=served(llm) == expected(last), version=llm.get_weight_version())


if __name__ == "__main__":
    {"versions": versions}[sys.argv[1]](*sys.argv[2:])
