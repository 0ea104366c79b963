"""Tests that run the commands and programs of the documentation: each block has one, or a reason
why it has none.

A block is identified by its page and the beginning of its first line. All commands also parse: see
test_commands.py.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs.test_fragments import RAN
from support.docs.pages import FENCE, ROOT, blocks, name_of, pages

RUNS = ("sh", "bash", "console", "python", "")
STORY = "tests/e2e/test_run_own_script.py::test_the_readmes_script_survives_a_kill"
FRAGMENT = "tests/docs/test_fragments.py::test_a_fragment_runs"
TUTORIAL = "tests/docs/test_tutorials.py::test_a_tutorial_prints_what_its_page_says"
EXTENDING = "tests/docs/test_extending.py"
HTTP = "tests/server/status/test_http_api.py"
DEMO = "tests/e2e/test_demo.py::test_the_demo_trains_and_loses_no_sample"
UP = "tests/e2e/test_run_own_script.py::test_up_serves_until_ctrl_c"
RUN_AGAIN = "tests/e2e/test_run_again.py::test_a_jobs_name_can_be_used_again"
DRAIN = (
    "tests/client/commands/test_drain_command.py::test_the_command_returns_once_the_member_has_left"
)
SNAPSHOTS = "tests/e2e/test_snapshots.py::test_a_job_continues_in_another_cluster"
COMPOSE = "tests/deploy/test_compose.py::test_trains_through_the_loss_of_a_worker"
TLS = "tests/e2e/test_tls.py::test_jobs_train_and_recover_with_tls"
TORCHRUN = (
    "tests/worker/torchrun/test_torchrun_nodes.py"
    "::test_training_goes_on_after_a_lost_node_and_with_a_new_one"
)
LIGHTNING = (
    "tests/worker/integrations/test_lightning.py"
    "::test_a_killed_worker_is_started_again_and_goes_on_from_the_checkpoint"
)
LIGHTNING_SESSION = (
    "tests/worker/integrations/test_lightning.py"
    "::test_the_lightning_example_trains_with_two_workers"
)
ACCELERATE = (
    "tests/worker/integrations/test_accelerate.py"
    "::test_a_lost_node_costs_only_the_epochs_after_the_newest_checkpoint"
)
KERAS = "tests/worker/integrations/test_keras.py"
NOT_RUN = "not run: "
TARGETS = NOT_RUN + "make runs itself in CI, target by target"
NO_CODE = NOT_RUN + "shows output or a picture, nothing to type"
CLUSTER = NOT_RUN + "needs a Kubernetes cluster and a registry; tests/deploy checks the manifests"
BENCH = "tests/bench/test_harness.py::test_a_replay_measures_each_system"
WAYS = NOT_RUN + "a line that the strategy's own tests in tests/worker run"

TABLE = {
    ("README.md", "make demo"): DEMO,
    ("README.md", "import shoal"): STORY,
    ("README.md", "pip install"): STORY,
    ("README.md", "shoal up"): RUN_AGAIN,
    ("README.md", "docker compose up"): COMPOSE,
    ("README.md", "make check"): TARGETS,
    ("docs/architecture.md", "etcd  (members"): NO_CODE,
    ("docs/checkpoints.md", 'checkpoints = shoal.Checkpoints("s3'): (
        "tests/worker/checkpoint/test_buckets.py"
    ),
    ("docs/checkpoints.md", "import torch.distributed.checkpoint"): (
        "tests/worker/checkpoint/test_plain_torch.py"
    ),
    (
        "docs/compression.md",
        "model, optimizer = session.distribute(model, optimizer, strategy=shoal.DDP",
    ): WAYS,
    (
        "docs/compression.md",
        "model, optimizer = session.distribute(model, optimizer, strategy=shoal.Async",
    ): WAYS,
    ("docs/compression.md", "from shoal.compression"): "tests/worker/compression/test_averages.py",
    ("docs/data.md", "batches = session.batches"): NOT_RUN
    + "a bar of tqdm around the loop above, which is run",
    ("docs/data.md", "generator = torch.Generator()"): (
        "tests/worker/data/test_batch_options.py::test_an_order_that_was_drawn_is_kept"
    ),
    ("docs/data.md", "ProposalConflict: members"): "tests/worker/data/test_content.py",
    ("docs/data.md", "urls = "): "tests/worker/data/test_shards.py",
    ("docs/deploy.md", "docker compose up"): COMPOSE,
    ("docs/deploy.md", "docker compose -f docker-compose.yml build"): NOT_RUN
    + "builds an image of one's own; compose-test builds and runs the others",
    ("docs/deploy.md", "export SHOAL_IMAGES"): CLUSTER,
    ("docs/deploy.md", "kubectl apply -k"): CLUSTER,
    ("docs/deploy.md", "sbatch"): "tests/deploy/test_slurm.py",
    ("docs/deploy.md", "kubectl create namespace"): "tests/deploy/test_cert_manager.py",
    ("docs/deploy.md", "kubectl -n shoal delete deployment,role"): NOT_RUN
    + "removes what an earlier apply left in a cluster",
    ("docs/deploy.md", "shoal certs init --dir ~/.shoal/sky"): "tests/deploy/test_skypilot.py",
    ("docs/deploy.md", "etcdctl role add"): "tests/server/etcd/test_etcd_access.py",
    ("docs/deploy.md", "PIP_EXTRA_INDEX_URL"): NOT_RUN
    + "fetches 2 GB; compose-test builds from it",
    ("docs/extending.md", "distribute -> attach"): NO_CODE,
    **dict.fromkeys(
        [("docs/extending.md", "# majority_sign.py"), ("docs/extending.md", "# train_majority.py")],
        f"{EXTENDING}::test_the_strategy_survives_a_kill",
    ),
    (
        "docs/extending.md",
        "# average_every.py",
    ): f"{EXTENDING}::test_averaging_survives_a_kill_within_a_round",
    ("docs/extending.md", "# second_network.py"): f"{EXTENDING}::test_the_backend_carries_a_step",
    ("docs/extending.md", "# shoal_names.py"): f"{EXTENDING}::test_the_command_is_found",
    ("docs/extending.md", "# tokenizer_field.py"): f"{EXTENDING}::test_a_field_is_proposed",
    ("docs/gpu.md", "make gpu-test"): "tests/gpu/test_campaign.py::test_every_case_passes_on_a_cpu",
    ("docs/gpu.md", "make gpu-bundle"): NOT_RUN
    + "fetches 30 MB; tests/deploy/test_gpu_bundle.py tries its parts",
    ("docs/gpu.md", "pip download --no-deps"): NOT_RUN
    + "fetches 300 MB; tests/deploy/test_gpu_bundle.py reduces a library of its own",
    ("docs/hardening.md", "shoal token create"): "tests/server/status/test_http_access.py",
    ("docs/integrations.md", "torchrun --rdzv"): LIGHTNING,
    ("docs/integrations.md", "from shoal.integrations.lightning"): LIGHTNING_SESSION,
    ("docs/integrations.md", "shoal run -n 3 examples/lightning"): LIGHTNING_SESSION,
    ("docs/integrations.md", "from shoal.integrations.accelerate"): (
        "tests/worker/integrations/test_accelerate_session.py::test_a_session_goes_on_without_a_lost_member"
    ),
    ("docs/integrations.md", "PET_RDZV_ID"): ACCELERATE,
    ("docs/integrations.md", "from shoal.integrations.transformers"): (
        "tests/worker/integrations/test_transformers.py::test_a_session_goes_on_without_a_lost_member"
    ),
    ("docs/integrations.md", "from shoal.integrations.keras_session"): (
        "tests/worker/integrations/test_keras_session.py::test_fit_goes_on_without_a_lost_member"
    ),
    ("docs/integrations.md", "from shoal.integrations.keras import KerasModule"): (
        f"{KERAS}::test_a_keras_module_under_sharded_strategies_equals_one_process"
    ),
    ("docs/integrations.md", "from shoal.integrations.keras import GlobalBatches"): (
        f"{KERAS}::test_fit_equals_one_process_and_ranks_hold_parts"
    ),
    ("docs/membership.md", "@shoal.validator"): "tests/worker/membership/test_validators.py",
    ("docs/membership.md", "shoal drain"): DRAIN,
    ("docs/membership.md", "3 x heartbeat"): NO_CODE,
    ("docs/parameter-server-snapshots.md", "shoal snapshot JOB"): SNAPSHOTS,
    ("docs/parameter-server-snapshots.md", "shoal coordinator"): SNAPSHOTS,
    ("docs/parameter-server-snapshots.md", "URL/JOB"): NO_CODE,
    ("docs/parameter-server.md", "model, optimizer ="): WAYS,
    ("docs/parameter-server.md", "$ shoal accept-loss"): (
        "tests/e2e/test_lost_shards.py::test_a_lost_shard_is_named_until_its_loss_is_accepted"
    ),
    ("docs/parameter-server.md", "$ SHOAL_TLS=up/certs python examples/plain"): (
        "tests/e2e/test_plain_grpc_worker.py::test_plain_grpc_clients_train_together"
    ),
    ("docs/pipeline.md", "with shoal.join"): WAYS,
    ("docs/run.md", "shoal run --hosts"): "tests/worker/launcher/test_run_hosts.py",
    ("docs/run.md", "shoal up --hosts"): "tests/client/remote/test_control_plane.py",
    ("docs/quickstart.md", "make demo"): DEMO,
    (
        "docs/quickstart.md",
        "pip install",
    ): "tests/e2e/test_wheel.py::test_the_command_works_from_the_wheel",
    ("docs/quickstart.md", "python train_ddp.py"): (
        "tests/docs/test_tutorials.py::test_the_first_tutorial_runs_by_itself"
    ),
    ("docs/quickstart.md", "shoal run"): TUTORIAL,
    ("docs/quickstart.md", "shoal up"): UP,
    ("docs/quickstart.md", "shoal status"): DRAIN,
    (
        "docs/run.md",
        "shoal run",
    ): "tests/worker/launcher/test_launch_workers.py::test_a_module_is_run_with_m",
    ("docs/report.md", ".venv/bin/python bench/"): BENCH,
    ("docs/run.md", "from shoal_proto.errors import JobFinished"): (
        "tests/client/membership/test_session_ending.py"
        "::test_a_restarted_script_whose_first_job_is_finished_fails"
    ),
    ("docs/runbook.md", "curl http"): "tests/client/commands/test_status_command.py",
    ("docs/security.md", "shoal certs init"): TLS,
    ("docs/security.md", "(umask 077; openssl"): NOT_RUN
    + "openssl's own; a test makes the secret itself",
    ("docs/status.md", "generation 4"): NO_CODE,
    ("docs/status.md", "shoal repair"): (
        "tests/e2e/test_quarantine.py::test_a_job_is_repaired_while_both_train"
    ),
    ("docs/status.md", "$ curl -s localhost:7780/readyz"): HTTP,
    ("docs/status.md", "$ curl -s localhost:7780/api/v1/jobs/digits/members/w7"): HTTP,
    ("docs/status.md", "$ curl -s -X POST"): HTTP,
    (
        "docs/strategies.md",
        "model, optimizer = session.distribute(model, optimizer, strategy=",
    ): WAYS,
    ("docs/strategies.md", 'with torch.device("meta")'): (
        "tests/worker/planning/test_plan_in_docs.py::test_the_table_shown_is_the_table_printed"
    ),
    ("docs/strategies.md", "hybrid on 8 ranks"): (
        "tests/worker/planning/test_plan_in_docs.py::test_the_table_shown_is_the_table_printed"
    ),
    (
        "docs/loop.md",
        "for part in batch.parts(4)",
    ): "tests/worker/session/test_micro_batches.py",
    ("docs/models.md", "model, optimizer = session.distribute(torch.compile("): (
        "tests/worker/strategies/test_compiled_models.py"
    ),
    ("docs/loop.md", "scaler ="): "tests/worker/session/test_grad_scaler.py",
    ("docs/models.md", "torch.manual_seed(7)"): "tests/worker/session/test_models_on_meta.py",
    (
        "docs/strategies.md",
        "model, optimizer = shoal.distribute",
    ): "tests/worker/without_session/test_distribute.py",
    ("docs/tables.md", "import shoal"): "tests/worker/test_embedding_session.py",
    ("docs/tensor-parallel.md", "strategy = shoal"): "tests/worker/layouts/tensor",
    ("docs/tensor-parallel.md", "shoal.TensorParallel("): "tests/worker/layouts/tensor",
    ("docs/torchrun.md", "shoal up"): TORCHRUN,
    ("docs/tutorials/ddp.md", "for epoch in range(10)"): NOT_RUN
    + "the loop before, in plain PyTorch",
    ("docs/tutorials/ddp.md", "python train_ddp.py"): TUTORIAL,
    (
        "docs/tutorials/fsdp.md",
        "python -c",
    ): "tests/docs/test_each_block_is_run.py::test_the_plan_on_the_command_line",
    ("docs/tutorials/lightning-and-hf.md", "shoal up"): LIGHTNING,
    ("docs/tutorials/lightning-and-hf.md", "shoal run"): LIGHTNING_SESSION,
    ("docs/upgrades.md", "ProtocolMismatch"): NO_CODE,
    ("docs/weights.md", "import torch"): (
        "tests/docs/test_weights_page.py::test_the_scripts_of_the_page_publish_and_read"
    ),
    ("docs/weights.md", "shoal up"): (
        "tests/docs/test_weights_page.py::test_the_scripts_of_the_page_publish_and_read"
    ),
    (
        "docs/weights.md",
        "shoal weights list",
    ): "tests/server/coordinator/publications/test_service.py",
    ("docs/weights.md", "series = session.series"): (
        "tests/e2e/test_weights_with_tables.py::test_a_job_publishes_its_tables_with_its_parameters"
    ),
    ("docs/weights.md", "with shoal.subscribe"): (
        "tests/e2e/test_weights_with_tables.py::test_a_job_publishes_its_tables_with_its_parameters"
    ),
    ("docs/weights.md", "VLLM_SERVER_DEV_MODE=1"): "tests/worker/integrations/test_vllm.py",
    ("docs/weights.md", "from vllm.distributed"): "tests/worker/integrations/test_vllm.py",
    ("docs/weights.md", "from shoal.integrations.trl import"): (
        "tests/worker/integrations/test_vllm.py"
        "::test_a_server_installs_versions_over_http_and_outlives_one_that_is_refused"
    ),
    ("docs/weights.md", "from shoal.integrations import trl"): (
        "tests/worker/integrations/test_vllm.py::test_trl_trains_with_rollouts_of_its_newest_version"
    ),
}
"""The test, its file or folder, or the reason why there is none; by page and beginning of the first
line."""


def executable() -> Iterator[tuple[str, str, str]]:
    """Page, language and text of each block that a reader could run."""
    for page in pages():
        for _, language, text in FENCE.findall(page.read_text()):
            if language in RUNS:
                yield name_of(page), language, text


def known(page: str, language: str, text: str) -> str:
    """The test that runs the block, or the reason why none does; empty if there is neither."""
    first = text.strip().splitlines()[0].strip()
    found = [k for k in TABLE if k[0] == page and first.startswith(k[1])]
    if found:
        return TABLE[max(found, key=lambda key: len(key[1]))]
    if page.startswith("docs/tutorials/"):
        is_script = language == "python" and re.match(r"# \w+\.py\n", text)
        return TUTORIAL if is_script or text.startswith("shoal run -n ") else ""
    numbers = [n for name, n in RAN if f"docs/{name}" == page]
    fragments = [*blocks(ROOT / page, "python")] if numbers else []
    return FRAGMENT if any(fragments[n] == text for n in numbers) else ""


def test_every_block_is_run_or_has_a_reason_not_to_be() -> None:
    missing = [
        f"{page}: {text.strip().splitlines()[0]}"
        for page, language, text in executable()
        if not known(page, language, text)
    ]
    assert missing == []


def test_every_entry_of_the_table_matches_a_block() -> None:
    firsts = [(page, text.strip().splitlines()[0].strip()) for page, _, text in executable()]
    unused = [
        key
        for key in TABLE
        if not any(p == key[0] and first.startswith(key[1]) for p, first in firsts)
    ]
    assert unused == []


def test_every_test_of_the_table_exists() -> None:
    wrong = []
    for reason in {*TABLE.values(), FRAGMENT, TUTORIAL}:
        if reason.startswith(NOT_RUN):
            continue
        path, _, name = reason.partition("::")
        names = []
        if name and (ROOT / path).exists():
            tree = ast.parse((ROOT / path).read_text())
            names = [
                n.name
                for n in ast.walk(tree)
                if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
        if not (ROOT / path).exists() or (name and name not in names):
            wrong.append(reason)
    assert wrong == []


@pytest.mark.long
def test_the_plan_on_the_command_line() -> None:
    """The one-liner of the tutorial on FSDP, run by a shell."""
    (typed, *_) = blocks(ROOT / "docs" / "tutorials" / "fsdp.md", "sh")
    bin_directory = Path(sys.executable).parent
    path = f"{bin_directory}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        typed,
        shell=True,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "fsdp on 4 ranks" in run.stdout
