"""Programs for a Python with vLLM, which may be another than that of the tests.

    python vllm_program.py versions DIRECTORY SERIES NUM_VERSIONS NUM_FAILURES
    python vllm_program.py served DIRECTORY SERIES
    python vllm_program.py grpo DIRECTORY SERIES

Each prints a line of JSON for each attempt.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    print("result", json.dumps(what), flush=True)


def tiny_model(seed: int) -> Any:
    """Make a Qwen2 of 300,000 random weights; greedy tokens differ between seeds."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        # vLLM's attention on a CPU supports no head size below 32.
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=255,
    )
    return Qwen2ForCausalLM(config).to(torch.float32).eval()


@torch.no_grad()
def expected(model: Any) -> list[list[int]]:
    """Return the tokens that transformers generates greedily."""
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
    """Install `num_versions` versions, then attempt `num_failures` updates that must fail."""
    import shoal  # noqa: PLC0415
    from shoal_proto.errors import ShoalError  # noqa: PLC0415

    tiny_model(0).save_pretrained(directory)
    llm = engine(Path(directory))
    say(what="initial", same=served(llm) == expected(tiny_model(0)))
    llm.init_weight_transfer_engine({"init_info": {"series": series, "reader": "engine"}})
    tokens: list[list[int]] = []
    for seed in range(1, int(num_versions) + 1):
        model = tiny_model(seed)
        found = shoal.publish(series, model, step=seed, keep=5).wait("committed", timeout=120)
        assert found is not None
        update(llm, found.number, str(found.number))
        tokens = served(llm)
        say(what="version", number=found.number, same=tokens == expected(model))
    state = tiny_model(99).state_dict()
    middle = len(state) // 2
    unknown = {"model.layers.1.unknown.weight": torch.ones(3)}
    named = list(state.items())
    unloadable = dict([*named[:middle], *unknown.items(), *named[middle:]])
    bad = [unloadable, {name: each[:1] for name, each in named}, dict(named[:middle])]
    numbers = []
    for each in bad:
        found = shoal.publish(series, each, step=99).wait("committed", timeout=120)
        assert found is not None
        numbers.append(found.number)
    kept = 0
    for attempt in range(int(num_failures)):
        number = 10_000 if attempt % 20 == 9 else [*numbers, 1][attempt % 4]
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


# --- over HTTP ---


@contextmanager
def served_over_http(directory: Path) -> Iterator[str]:
    """Run `vllm serve` on the model in the folder, and yield its URL."""
    import requests  # noqa: PLC0415

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(directory)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "64", "--max-num-seqs", "8", "--enforce-eager"]
    command += ["--no-enable-prefix-caching", "--weight-transfer-config", '{"backend": "shoal"}']
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (directory / "serve.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            url, ends_s = f"http://127.0.0.1:{port}", time.monotonic() + 900
            while True:
                try:
                    if requests.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                except requests.RequestException:
                    assert server.poll() is None, (directory / "serve.log").read_text()[-3000:]
                assert time.monotonic() < ends_s, "vllm serve does not come up"
                time.sleep(1)
            yield url
        finally:
            server.terminate()
            server.wait(60)


def completed(url: str, directory: Path) -> list[list[int]]:
    """Return the tokens that the server generates greedily."""
    import requests  # noqa: PLC0415

    found = []
    for prompt in PROMPTS:
        body = {
            "model": str(directory),
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        answer = requests.post(f"{url}/v1/completions", json=body, timeout=120)
        answer.raise_for_status()
        tokens = answer.json()["choices"][0]["logprobs"]["tokens"]
        found.append([int(each.removeprefix("token_id:")) for each in tokens])
    return found


def tokenizer() -> Any:
    """Make a tokenizer of 256 words, `w0` to `w255`."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w255", pad_token="w254", unk_token="w3"
    )


def sent_by_trl(url: str, series: str, model: Any) -> str:
    """Send the weights as TRL's asynchronous trainers do; return the version that vLLM names."""
    import requests  # noqa: PLC0415
    from accelerate import PartialState  # noqa: PLC0415
    from trl.experimental.async_grpo.vllm_client import VLLMClient  # noqa: PLC0415

    from shoal.integrations import trl  # noqa: PLC0415

    PartialState(cpu=True)
    client = trl.WeightTransferClient(VLLMClient(url), series=series)
    client.init_weight_transfer()
    client.pause()
    client.send_weights(iter(model.state_dict().items()))
    client.resume()
    client.destroy()
    answer: str = requests.get(f"{url}/weight_info", timeout=60).json()["weight_version"]
    return answer


def served_versions(directory: str, series: str) -> None:
    """Run vLLM's own trainer class and HTTP client, a refused update, `follow`, and the client for
    TRL's asynchronous trainers."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415
    from vllm.distributed.weight_transfer.base import ModuleSource  # noqa: PLC0415
    from vllm.distributed.weight_transfer.clients import (  # noqa: PLC0415
        HTTPVLLMWeightSyncClient,
    )

    import shoal  # noqa: PLC0415
    from shoal.integrations.vllm import (  # noqa: PLC0415
        ShoalTrainerInit,
        follow,
        install,
        register,
    )

    register()
    where = Path(directory)
    tiny_model(0).save_pretrained(where)
    tokenizer().save_pretrained(where)
    with served_over_http(where) as url:
        client, model = HTTPVLLMWeightSyncClient(url), tiny_model(1)
        init = ShoalTrainerInit(rank=0, series=series)
        source = ModuleSource(model)
        trainer = WeightTransferTrainerFactory.trainer_init(init, client=client, source=source)
        trainer.send_weights()
        say(what="trainer", same=completed(url, where) == expected(model))
        try:
            install(client, 10_000)
        except Exception as error:  # noqa: BLE001 - an HTTP error, whatever its class
            say(what="refused", error=type(error).__name__)
        say(what="kept", same=completed(url, where) == expected(model))
        model = tiny_model(2)
        shoal.publish(series, model).wait("committed", timeout=120)
        follow(client, series, until=lambda version: True)
        say(what="followed", same=completed(url, where) == expected(model))
        model = tiny_model(3)
        version = sent_by_trl(url, series, model)
        say(what="sent", same=completed(url, where) == expected(model), version=version)


def grpo(directory: str, series: str) -> None:
    """Run three steps of TRL's GRPOTrainer, whose rollouts come from `vllm serve`."""
    from accelerate import PartialState  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    import shoal  # noqa: PLC0415
    from shoal.integrations.trl import use_series  # noqa: PLC0415

    PartialState(cpu=True)
    use_series(series)
    where = Path(directory)
    model = tiny_model(0)
    model.save_pretrained(where)
    words = tokenizer()
    words.save_pretrained(where)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(ord(each) for each in text) % 7) for text in completions]

    with served_over_http(where) as url, shoal.subscribe(series) as reader:
        config = GRPOConfig(
            output_dir=str(where / "out"),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            max_steps=3,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            learning_rate=0.01,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            bf16=False,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["w1 w5 w9", "w7 w8 w11"] * 8}),
            processing_class=words,
        )
        trainer.train()
        client = trainer.vllm_generation.vllm_client
        say(what="trained", version=client.version.number, newest=reader.newest().number)
        trainer.vllm_generation.sync_weights()
        say(what="served", same=completed(url, where) == expected(trainer.model.eval()))


if __name__ == "__main__":
    programs = {"versions": versions, "served": served_versions, "grpo": grpo}
    programs[sys.argv[1]](*sys.argv[2:])
