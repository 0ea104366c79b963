"""A script's own operations in a step of a session: refused by name if they would train something
else, and left alone otherwise."""

import math
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.members.thread_members import ThreadJob, lone, train_alone
from support.models.small_layers import LimitedRows
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.session.session import Session
from shoal.session.step import reason_of
from shoal.strategies import find_strategy
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, LoadingFailed

TOGETHER = ("ddp", "zero1", "zero2", "fsdp", "tensor", "hybrid", "local-sgd", "diloco")
APART = ("async-sgd", "bsp", "async-diloco")


def loss_of(session: Session, model: Any, batch: shoal.Batch) -> Tensor:
    return cross_entropy(model(batch.inputs), batch.targets)


@pytest.mark.parametrize("strategy", ["ddp", "async-sgd"])
def test_a_second_step_on_a_batch_is_refused(cluster: LocalCluster, strategy: str) -> None:
    """The position in the samples is the number of steps: the next batch would be left out."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        for _ in range(2):
            with session.step():
                session.backward(loss_of(session, model, batch))

    with pytest.raises(InvalidSpec, match=r"second step on the batch of step 0.*session\.update"):
        train_alone(cluster, strategy, body)


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("strategy", [*TOGETHER, "pipeline", *APART])
@pytest.mark.parametrize("place", ["in the step", "after the step"])
def test_a_script_that_steps_the_optimizer_is_refused(
    cluster: LocalCluster, strategy: str, place: str
) -> None:
    """A step of the script after that of the session would apply each gradient twice."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.forward_backward(batch, cross_entropy)
            if place == "in the step":
                optimizer.step()
        optimizer.step()

    with pytest.raises(InvalidSpec, match=r"optimizer\.step\(\).*session\.step\(\)"):
        train_alone(cluster, strategy, body)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "async-sgd"])
def test_a_loss_with_weights_that_each_member_would_train_by_itself_is_refused(
    cluster: LocalCluster, strategy: str
) -> None:
    """A loss may have a learned margin, for example, with an optimizer unknown to the session: the
    members' margins would drift apart. Weights that no optimizer steps, as of a teacher, are left
    alone."""
    margin, teacher = nn.Linear(5, 5), nn.Linear(5, 5)
    of_margin = torch.optim.SGD(margin.parameters(), lr=0.1)

    def distils(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(cross_entropy(teacher(model(batch.inputs)), batch.targets))
        of_margin.step()

    def learns(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(cross_entropy(margin(model(batch.inputs)), batch.targets))
            of_margin.step()

    train_alone(cluster, strategy, distils)
    with pytest.raises(InvalidSpec, match=r"SGD with a parameter of shape \(5, 5\).*in a list"):
        train_alone(cluster, strategy, learns)
    of_margin.step()


@pytest.mark.parametrize("place", ["in the step", "after the step"])
def test_a_loss_with_weights_that_is_used_later_is_refused(
    cluster: LocalCluster, place: str
) -> None:
    """The step after the first one of the margin's optimizer notices it."""
    margin = nn.Linear(5, 5)
    of_margin = torch.optim.SGD(margin.parameters(), lr=0.1)
    taken = []

    def learns_later(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            outputs = model(batch.inputs)
            is_used = batch.step >= 2
            loss = cross_entropy(margin(outputs) if is_used else outputs, batch.targets)
            session.backward(loss)
            if is_used and place == "in the step":
                of_margin.step()
        if is_used and place == "after the step":
            of_margin.step()
        taken.append(batch.step)

    with pytest.raises(InvalidSpec, match=r"SGD with a parameter of shape \(5, 5\).*in a list"):
        train_alone(cluster, "ddp", learns_later, num_steps=6)
    assert taken == [0, 1, 2]


@pytest.mark.parametrize("strategy", [*TOGETHER, "pipeline", *APART])
@pytest.mark.parametrize("place", ["in the step", "after the step"])
def test_an_optimizer_of_the_model_that_was_not_distributed_is_refused(
    cluster: LocalCluster, strategy: str, place: str
) -> None:
    """A script may have one optimizer for matrices and one for the rest. If the model is cut or
    copied, the second one trained nothing; otherwise a joining member had none of its state."""
    model, _ = build("sgd", "layers")
    matrices = torch.optim.SGD([each for each in model.parameters() if each.ndim > 1], lr=0.02)
    others = torch.optim.Adam([each for each in model.parameters() if each.ndim < 2])

    def body() -> None:
        with lone(cluster) as session:
            session.distribute(model, matrices, strategy=strategy)
            for batch in session.batches(data(), global_batch_size=24):
                with session.step():
                    session.forward_backward(batch, cross_entropy)
                    if place == "in the step":
                        others.step()
                others.step()

    with pytest.raises(InvalidSpec, match=r"not distributed.*Adam.*in a list"):
        body()
    others.step()


def test_an_optimizer_that_wraps_another_trains_as_that_one(cluster: LocalCluster) -> None:
    """Sharpness-aware minimisation and Lookahead are written like this: the outer optimizer is
    distributed."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner
            self.param_groups = inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    ended = []
    for wraps in (True, False):
        model, optimizer = build("sgd", "layers")
        given = Outer(optimizer) if wraps else optimizer
        with lone(cluster) as session:
            copy, _ = session.distribute(model, given)
            for batch in session.batches(data(), global_batch_size=24, epochs=1):
                with session.step():
                    session.backward(loss_of(session, copy, batch))
            ended.append(session.state_dict())
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in ended[0])


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "async-sgd"])
@pytest.mark.parametrize("dropped_by", ["optimizer", "model"])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_a_script_drops_before_they_train_anything_are_refused(
    cluster: LocalCluster, strategy: str, dropped_by: str, to_none: bool
) -> None:
    """A script from which only `optimizer.step()` was removed calls `zero_grad` after its backward
    pass: no parameter moves, and no error says so."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(loss_of(session, model, batch))
            {"optimizer": optimizer, "model": model}[dropped_by].zero_grad(set_to_none=to_none)

    with pytest.raises(InvalidSpec, match=r"dropped the gradients of step 0.*zero_grad"):
        train_alone(cluster, strategy, body)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_a_script_drops_between_two_passes_or_in_part_stay_dropped(
    cluster: LocalCluster, to_none: bool
) -> None:
    """Sharpness-aware minimisation drops the first pass's gradients, which only say where the
    second pass is. Others drop the gradients of layers that are not trained yet, or drop gradients
    after the step."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            optimizer.zero_grad(set_to_none=to_none)
            session.backward(loss_of(session, model, batch) * 3)
            optimizer.zero_grad(set_to_none=to_none)
            session.backward(loss_of(session, model, batch))
            next(model.children()).zero_grad()
        optimizer.zero_grad(set_to_none=to_none)

    def plain(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(loss_of(session, model, batch))
            for parameter in next(model.children()).parameters():
                parameter.grad = None

    torch.testing.assert_close(
        train_alone(cluster, "ddp", body), train_alone(cluster, "ddp", plain)
    )


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_several_members_drop_the_gradients_between_two_passes(
    cluster: LocalCluster, strategy: str, to_none: bool
) -> None:
    """Regression: under zero1 gradients stayed on all members that do not step the parameter."""

    def member(job: ThreadJob, num_passes: int, model: Any, optimizer: Any) -> dict[str, Tensor]:
        with job.join() as session:
            model, optimizer = session.distribute(model, optimizer, strategy=strategy)
            for batch in session.batches(data(), global_batch_size=24):
                with session.step():
                    for _ in range(num_passes - 1):
                        session.backward(loss_of(session, model, batch) * 3)
                        optimizer.zero_grad(set_to_none=to_none)
                    session.backward(loss_of(session, model, batch))
            return {name: tensor.clone() for name, tensor in session.state_dict().items()}

    ends = []
    for num_passes in (1, 2):
        job = ThreadJob(cluster=cluster, num_members=2)
        # Threads share torch's generator: build before they start.
        given = [(job, num_passes, *build("sgd", "layers")) for _ in range(2)]
        ends.append(job.results(member, *given)[0])
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "async-sgd"])
@pytest.mark.parametrize("dropped_by", ["optimizer", "model"])
def test_gradients_that_a_script_drops_between_two_parts_are_refused(
    cluster: LocalCluster, strategy: str, dropped_by: str
) -> None:
    """A call before the first part drops nothing, and is allowed."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            for part in batch.parts(2):
                {"optimizer": optimizer, "model": model}[dropped_by].zero_grad()
                session.backward(loss_of(session, model, part))

    with pytest.raises(InvalidSpec, match=r"loop over the parts.*zero_grad\(\) after 1 of 2 parts"):
        train_alone(cluster, strategy, body)


def test_calling_batches_for_each_epoch_is_refused_with_the_remedy(cluster: LocalCluster) -> None:
    model, optimizer = build("sgd", "layers")
    with lone(cluster) as session:
        session.distribute(model, optimizer)
        session.batches(data(), global_batch_size=24, epochs=1)
        with pytest.raises(InvalidSpec, match=r"called twice.*epochs=n.*batch\.epoch"):
            session.batches(data(), global_batch_size=24, epochs=1)


def test_a_second_loop_over_the_batches_is_refused_with_the_remedy(cluster: LocalCluster) -> None:
    """A script with a loop for each epoch would train in the first loop only."""

    def loop(session: shoal.Session, model: nn.Module, batches: Any) -> None:
        for batch in batches:
            with session.step():
                session.backward(loss_of(session, model, batch))

    model, optimizer = build("sgd", "layers")
    with lone(cluster) as session:
        model, optimizer = session.distribute(model, optimizer)
        batches = session.batches(data(), global_batch_size=24, epochs=1)
        for batch in batches:  # the loop was left before its end
            with session.step():
                session.backward(loss_of(session, model, batch))
            break
        loop(session, model, batches)
        with pytest.raises(InvalidSpec, match=r"second loop begins.*epochs=n.*batch\.epoch"):
            loop(session, model, batches)


def test_a_second_loop_after_an_error_raises_the_error_again() -> None:
    """Regression: the loop ended at once without an error, as if all was trained."""

    class Away(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 30:
                raise OSError("the storage does not answer")
            return super().__getitem__(index)

    model, optimizer = build("sgd", "layers")
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer)
        samples = Away(zip(*data(), strict=True))
        batches = session.batches(samples, global_batch_size=24, shuffle=False)
        for _ in range(2):
            with pytest.raises(LoadingFailed, match=r"sample 30 .*storage does not answer"):
                for batch in batches:
                    with session.step():
                        session.backward(loss_of(session, model, batch))
        assert session.step_number == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda model, optimizer: (optimizer, model),
            "the model given to .* has another type; saw torch.optim",
        ),
        (
            lambda model, _: (model, model.parameters()),
            "the optimizer given to .* has another type; saw builtins",
        ),
        (
            lambda model, _: (model, None),
            "another type; saw builtins.NoneType.*as optimizer a torch",
        ),
        (
            lambda model, optimizer: ([model, None], optimizer),
            "the model given to .* has another type",
        ),
    ],
    ids=["swapped", "parameters", "none", "in a list"],
)
@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_values_that_are_no_model_or_optimizer_are_refused_by_type(
    cluster: LocalCluster, given: Any, message: str, strategy: str
) -> None:
    with (
        shoal.join(f"guard-{secrets.token_hex(4)}", coordinator=cluster.coordinator) as session,
        pytest.raises(InvalidSpec, match=message),
    ):
        session.distribute(*given(*build("sgd", "layers")), strategy=strategy)


def test_the_script_may_step_the_optimizer_after_the_session(cluster: LocalCluster) -> None:
    """A call of `step` within the session is refused."""
    kept = []

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        kept.append(optimizer)
        with session.step():
            session.backward(loss_of(session, model, batch))

    train_alone(cluster, "ddp", body)
    kept[0].step()


@pytest.mark.parametrize("strategy", [*TOGETHER, "pipeline", *APART])
def test_a_scaled_loss_is_refused(cluster: LocalCluster, strategy: str) -> None:
    """The session does not unscale gradients without the scaler. Values computed from the scaled
    loss are refused too."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def loss_function(outputs: Any, targets: Any) -> Tensor:
        return scaler.scale(cross_entropy(outputs, targets)) / 4 + 1

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.forward_backward(batch, loss_function)

    with pytest.raises(InvalidSpec, match=r"GradScaler.*session\.backward\(loss\)"):
        train_alone(cluster, strategy, body)


def test_a_scaler_that_steps_the_optimizer_is_refused(cluster: LocalCluster) -> None:
    """Applies also to a scaler that is switched off."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(scaler.scale(loss_of(session, model, batch)))
            scaler.step(optimizer)

    with pytest.raises(InvalidSpec, match=r"GradScaler\.step"):
        train_alone(cluster, "ddp", body)


def test_a_subclass_that_scales_by_itself_is_refused_too(cluster: LocalCluster) -> None:
    """The scaler of torch.distributed.fsdp is such a subclass."""

    class Own(torch.amp.GradScaler):
        def scale(self, outputs: Any) -> Any:
            return outputs * 3.0

    scaler = Own("cpu")

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(scaler.scale(loss_of(session, model, batch)))

    with pytest.raises(InvalidSpec, match="GradScaler"):
        train_alone(cluster, "ddp", body)


@pytest.mark.parametrize("strategy", [*TOGETHER, *APART])
def test_operations_that_train_what_the_script_says_are_accepted(
    cluster: LocalCluster, strategy: str
) -> None:
    """A script may use a loss times two; a scaler that is switched off, or another model's; a sum
    of losses of two forward passes; gradients from autograd.grad; hooks; clipping; forward passes
    without gradients in a step and between steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    other = nn.Linear(20, 1)
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    seen = []

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step() as step:
            inputs = batch.inputs.clone().requires_grad_()
            outputs = model(inputs)
            outputs.register_hook(seen.append)
            loss = cross_entropy(outputs, batch.targets)
            if strategy in ("ddp", "local-sgd"):  # sharded weights are gathered in backward once
                assert torch.autograd.grad(loss, inputs, retain_graph=True)[0].any()
            again = cross_entropy(model(batch.inputs), batch.targets)
            off = torch.amp.GradScaler("cpu", enabled=False)
            session.backward(off.scale(loss * 2 + again * 0.5))
            scaler.scale(other(batch.inputs).mean()).backward()
            scaler.step(of_other)
            scaler.update()
            session.clip_grad_norm(1.0)
            with torch.no_grad():
                model(batch.inputs)
        assert step.committed
        with torch.no_grad():
            model(batch.inputs)

    assert train_alone(cluster, strategy, body)
    assert len(seen) >= 3


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "tensor", "hybrid"])
@pytest.mark.parametrize("order", ["before", "behind"])
def test_a_backward_pass_beside_the_sessions_is_refused(
    cluster: LocalCluster, strategy: str, order: str
) -> None:
    """The script's own pass leaves out the weight of this member's share of the batch."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            first, second = (loss_of(session, model, batch) for _ in range(2))
            if order == "before":
                first.backward()
            session.backward(second)
            if order == "behind":
                first.backward()

    with pytest.raises(InvalidSpec, match=r"loss\.backward\(\).*session\.backward\(loss\)"):
        train_alone(cluster, strategy, body)


class Idle(nn.Module):
    """A model with a layer that no loss depends on, and a table of rows with or without sparse
    gradients."""

    def __init__(self, *, sparse: bool, idle: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 5))
        self.sparse = sparse
        if idle:
            self.idle = nn.Linear(2, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = (inputs[:, 0] * 4).long().clamp(0, 8)
        return nn.functional.embedding(rows, self.table, sparse=self.sparse)


def train_own(cluster: LocalCluster, strategy: str, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lone(cluster) as session:
        whole, _ = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(data(), global_batch_size=24):
            with session.step():
                session.backward(loss_of(session, whole, batch))


@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "DDP"), ("zero1", "Zero1")])
def test_a_parameter_that_the_loss_does_not_depend_on_is_named(
    cluster: LocalCluster, strategy: str, kind: str
) -> None:
    """The error names the option of the strategy in use that allows such parameters."""
    text = rf"saw idle\.weight, idle\.bias.*shoal\.{kind}\(find_unused_parameters"
    with pytest.raises(InvalidSpec, match=text):
        train_own(cluster, strategy, Idle(sparse=False, idle=True))


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_sparse_gradient_of_a_function_is_refused(cluster: LocalCluster, strategy: str) -> None:
    with pytest.raises(InvalidSpec, match=r"sparse gradients of a parameter of \(9, 5\)"):
        train_own(cluster, strategy, Idle(sparse=True, idle=False))


@pytest.mark.parametrize("strategy", [*TOGETHER, "pipeline"])
def test_layers_with_sparse_gradients_are_refused_at_once(strategy: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidSpec, match=r"sparse gradients of 0;.*sparse=False"):
        find_strategy(strategy).distribute(model, optimizer)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "zero1", "zero2", "fsdp", "hsdp", "tensor", "fsdp-tensor", "pipeline", "hybrid"],
)
def test_layers_that_scale_down_the_rows_that_a_pass_uses_are_refused_at_once(
    strategy: str, layer: Any
) -> None:
    """Regression: under ddp and zero1 each member trained other weights, depending on its own
    samples."""
    model = nn.Sequential(layer(9, 4, max_norm=1.0), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidSpec, match=r"max_norm of 0;.*without max_norm"):
        find_strategy(strategy).distribute(model, optimizer)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "zero1", "zero2", "fsdp", "hsdp", "tensor", "fsdp-tensor", "pipeline", "hybrid"],
)
def test_layers_that_divide_gradients_by_the_frequency_of_an_index_are_refused_at_once(
    strategy: str, layer: Any
) -> None:
    """Regression: each member divided by the frequency of an index in its own share."""
    model = nn.Sequential(layer(9, 4, scale_grad_by_freq=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidSpec, match=r"scale_grad_by_freq of 0;.*scale_grad_by_freq=False"):
        find_strategy(strategy).distribute(model, optimizer)


def by_frequency(rows: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return nn.functional.embedding(rows, weight, scale_grad_by_freq=True)


def bag_by_frequency(rows: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return nn.functional.embedding_bag(rows, weight, scale_grad_by_freq=True, mode="sum")


@pytest.mark.parametrize("whole_pass", [False, True], ids=["backward", "forward_backward"])
@pytest.mark.parametrize("look_up", [by_frequency, bag_by_frequency])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local-sgd"])
def test_functions_that_divide_gradients_by_frequency_are_refused_in_the_first_step(
    cluster: LocalCluster, strategy: str, look_up: Callable[..., Tensor], whole_pass: bool
) -> None:
    """Members under local-sgd train on their own batches, as one process does, and are not
    refused."""
    if strategy == "local-sgd":
        assert trained_with_limits(cluster, strategy, look_up, whole_pass) == 2
    else:
        with pytest.raises(InvalidSpec, match="scale_grad_by_freq of an embedding function"):
            trained_with_limits(cluster, strategy, look_up, whole_pass)


def trained_with_limits(
    cluster: LocalCluster, strategy: str, look_up: Callable[..., Tensor], whole_pass: bool = False
) -> int:
    """Return the number of committed steps of a model that limits the norms of rows in its forward
    pass."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(LimitedRows(look_up), nn.LazyLinear(2))
    rows = torch.arange(24).view(12, 2) % 9
    model(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lone(cluster) as session:
        model, _ = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches((rows, rows[:, 0] % 2), global_batch_size=6):
            with session.step():
                if whole_pass:
                    session.forward_backward(batch, cross_entropy)
                else:
                    session.backward(loss_of(session, model, batch))
        return session.step_number


@pytest.mark.parametrize("look_up", [nn.functional.embedding, nn.functional.embedding_bag])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "tensor", "fsdp"])
def test_functions_that_scale_down_the_rows_that_a_pass_uses_are_refused_at_once(
    cluster: LocalCluster, strategy: str, look_up: Callable[..., Tensor]
) -> None:
    """Functions are refused like layers: each member would train other weights, depending on its
    own samples."""
    with pytest.raises(InvalidSpec, match=r"max_norm of a parameter|writes to 0\.weight"):
        trained_with_limits(cluster, strategy, look_up)


def test_functions_that_scale_down_rows_are_accepted_under_local_sgd(
    cluster: LocalCluster,
) -> None:
    assert trained_with_limits(cluster, "local-sgd", nn.functional.embedding) == 2


def test_the_reason_of_an_error_without_text_is_its_name() -> None:
    """The reason for a member that Ctrl-C ended has no colon before an empty text."""
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert reason_of(ValueError("bad")) == "ValueError: bad"


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor", "async-sgd"])
@pytest.mark.parametrize("at_step", [0, 2])
def test_changing_requires_grad_between_steps_is_refused(
    cluster: LocalCluster, strategy: str, at_step: int
) -> None:
    """A layer trained from then on would get gradients of each member's own, and none in a
    joiner."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        if batch.step == at_step:
            frozen = next(iter(model.parameters()))
            frozen.requires_grad_(not frozen.requires_grad)
        with session.step():
            session.backward(loss_of(session, model, batch))

    pattern = (
        rf"trained parameters differ.*set to False, after {at_step} committed steps.*grad = None"
    )
    with pytest.raises(InvalidSpec, match=pattern):
        train_alone(cluster, strategy, body)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", "hsdp"])
def test_second_derivatives_are_refused_under_strategies_that_free_weights(
    cluster: LocalCluster, strategy: str
) -> None:
    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            inputs = batch.inputs.requires_grad_(True)
            scores = model(inputs)
            (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
            session.backward(cross_entropy(scores, batch.targets) + slope.pow(2).mean())

    with pytest.raises(InvalidSpec, match=r"differentiated again.*zero1"):
        train_alone(cluster, strategy, body)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp", "tensor"])
def test_gradients_of_the_inputs_do_not_change_the_step(
    cluster: LocalCluster, strategy: str
) -> None:
    """Adversarial training does so. These gradients do not change those of the step."""

    def plain(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(loss_of(session, model, batch))

    def asking(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            inputs = batch.inputs.clone().requires_grad_(True)
            torch.autograd.grad(cross_entropy(model(inputs), batch.targets), inputs)
            session.backward(loss_of(session, model, batch))

    expected, found = (train_alone(cluster, strategy, body) for body in (plain, asking))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "tensor", "async-sgd"])
def test_parameters_added_to_an_optimizer_between_steps_are_refused(
    cluster: LocalCluster, strategy: str
) -> None:
    """A member that joins after that step would not train them."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        if batch.step == 2:
            kept.append(optimizer)
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with session.step():
            session.backward(loss_of(session, model, batch))

    kept: list[torch.optim.Optimizer] = []
    with pytest.raises(
        InvalidSpec, match=r"the optimizer's parameters, after 2 committed.*grad = None"
    ):
        train_alone(cluster, strategy, body)
    # After the session the optimizer is the script's again.
    kept[0].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(kept[0].param_groups) == 2


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "tensor"])
def test_parameters_removed_from_an_optimizer_between_steps_are_refused(
    cluster: LocalCluster, strategy: str
) -> None:
    """A member that joins after that step would go on training them."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        group = optimizer.param_groups[0]
        if batch.step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        if batch.step == 2:
            group["params"] = group["params"][1:]
        with session.step():
            session.backward(loss_of(session, model, batch))

    with pytest.raises(InvalidSpec, match=r"the optimizer's parameters, after 2 committed steps"):
        train_alone(cluster, strategy, body)


def halve(model: nn.Module) -> None:
    model.half()


def widen(model: nn.Module) -> None:
    parameter = next(model.parameters())
    parameter.data = parameter.data.new_zeros(2, *parameter.shape)


@pytest.mark.sampled("change")
@pytest.mark.parametrize("change", [halve, widen])
@pytest.mark.parametrize("strategy", ["zero1", "ddp", "local-sgd", "diloco", "async-sgd"])
def test_parameters_of_another_dtype_or_shape_are_refused(
    cluster: LocalCluster, strategy: str, change: Callable[[nn.Module], None]
) -> None:
    """The parameters are the same objects as before, but other members' gradients do not fit
    them."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(loss_of(session, model, batch))
        if batch.step == 0:
            change(model)

    with pytest.raises(InvalidSpec, match=r"has changed since .*expected torch\.float32"):
        train_alone(cluster, strategy, body)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_a_model_that_is_cut_and_gets_another_dtype_is_refused(
    cluster: LocalCluster, strategy: str
) -> None:
    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(loss_of(session, model, batch))
        if batch.step == 0:
            halve(model)

    with pytest.raises(InvalidSpec, match="has changed since the model was distributed"):
        train_alone(cluster, strategy, body)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor", "local-sgd", "async-sgd"])
def test_a_layer_that_takes_the_place_of_another_is_refused(
    cluster: LocalCluster, strategy: str
) -> None:
    """The new layer is in no optimizer, and each member has one of its own."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        if batch.step == 1:
            name, layer = next((n, m) for n, m in model.named_children() if m._parameters)
            setattr(model, name, nn.Linear(layer.in_features, layer.out_features))
        with session.step():
            session.backward(loss_of(session, model, batch))

    with pytest.raises(InvalidSpec, match=r"other layers than.*a new .*after 1 committed steps"):
        train_alone(cluster, strategy, body)


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero1", "tensor", "local-sgd", "async-sgd"])
def test_a_parameter_that_takes_the_place_of_another_is_refused(
    cluster: LocalCluster, strategy: str
) -> None:
    """The new parameter is in no optimizer, and the layout computes with the former one."""

    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        if batch.step == 0:
            layer = next(part for part in model.modules() if part._parameters)
            layer.weight = nn.Parameter(torch.zeros(layer.weight.shape))
        with session.step():
            session.backward(loss_of(session, model, batch))

    with pytest.raises(InvalidSpec, match=r"other parameters than.*a new .*weight.*after 0 comm"):
        train_alone(cluster, strategy, body)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_slice_of_the_model_has_the_models_own_class(
    cluster: LocalCluster, strategy: str
) -> None:
    def body(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        assert type(model[:2]) is nn.Sequential
        assert next(model[:2].parameters()) is next(model.parameters())
        assert len(type(model)(nn.Linear(2, 2))) == 1
        with session.step():
            session.backward(loss_of(session, model, batch))

    train_alone(cluster, strategy, body)


def in_two_calls(parameters: Any, max_norm: float) -> None:
    """Clip as torchtitan does."""
    each = list(parameters)
    norm = nn.utils.get_total_norm([one.grad for one in each])
    nn.utils.clip_grads_with_norm_(iter(each), max_norm=max_norm, total_norm=norm)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, in_two_calls])
def test_clipping_by_torch_is_refused_under_pipeline(
    cluster: LocalCluster, clip: Callable[[Any, float], object]
) -> None:
    """A stage's gradients have a norm of their own; under ddp torch clips as the session does."""

    def clips(session: Session, model: Any, optimizer: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.forward_backward(batch, cross_entropy)
            clip(model.parameters(), 0.1)

    with pytest.raises(InvalidSpec, match=r"under pipeline.*session\.clip_grad_norm"):
        train_alone(cluster, "pipeline", clips)
    plain = train_alone(cluster, "ddp", clips)

    def clips_by_session(session: Session, model: Any, _: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.forward_backward(batch, cross_entropy)
            session.clip_grad_norm(0.1)

    for name, tensor in train_alone(cluster, "ddp", clips_by_session).items():
        assert torch.equal(tensor, plain[name])


@pytest.mark.parametrize("strategy", ["pipeline", "hybrid", "fsdp", "tensor"])
def test_values_may_be_clipped_one_by_one(cluster: LocalCluster, strategy: str) -> None:
    """A member that has a part of the gradients clips its part."""

    def clips(session: Session, model: Any, _: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.forward_backward(batch, cross_entropy)
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    def clips_in_the_optimizer(
        session: Session, model: Any, optimizer: Any, batch: shoal.Batch
    ) -> None:
        optimizer.register_step_pre_hook(
            lambda own, *_: nn.utils.clip_grad_value_(own.param_groups[0]["params"], 1e-3)
        )
        with session.step():
            session.forward_backward(batch, cross_entropy)

    expected = train_alone(cluster, "ddp", clips)
    for body in (clips, clips_in_the_optimizer):
        for name, tensor in train_alone(cluster, strategy, body).items():
            torch.testing.assert_close(tensor, expected[name])


def by_weight(session: Session, model: Any, batch: shoal.Batch) -> None:
    session.backward(loss_of(session, model, batch), weight=4)


def in_one(session: Session, _: Any, batch: shoal.Batch) -> None:
    session.forward_backward(batch, cross_entropy)


@pytest.mark.parametrize(
    ("strategy", "backward"), [("ddp", by_weight), ("fsdp", by_weight), ("pipeline", in_one)]
)
def test_a_backward_pass_after_clipping_is_refused(
    cluster: LocalCluster, strategy: str, backward: Callable[..., None]
) -> None:
    """Gradients of such a pass would be scaled otherwise than those before, or not reduced."""

    def clips(session: Session, model: Any, _: Any, batch: shoal.Batch) -> None:
        with session.step():
            backward(session, model, batch)
            session.clip_grad_norm(0.1)
            backward(session, model, batch)

    with pytest.raises(InvalidSpec, match=r"backward pass after session\.clip_grad_norm"):
        train_alone(cluster, strategy, clips)


@pytest.mark.parametrize("strategy", ["hybrid", "zero1", "fsdp"])
def test_clipping_within_the_optimizers_step_is_refused(
    cluster: LocalCluster, strategy: str
) -> None:
    """The clipping is refused if each member steps its own parameters, or parts of them."""

    def clips(optimizer: Any, *_: Any) -> None:
        own = [each for group in optimizer.param_groups for each in group["params"]]
        nn.utils.clip_grad_norm_(own, 0.1)

    def body(session: Session, _: Any, optimizer: Any, batch: shoal.Batch) -> None:
        optimizer.register_step_pre_hook(clips)
        with session.step():
            session.forward_backward(batch, cross_entropy)

    with pytest.raises(InvalidSpec, match=r"within optimizer\.step\(\)"):
        train_alone(cluster, strategy, body)
    train_alone(cluster, "ddp", body)


@pytest.mark.parametrize(
    "clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, in_two_calls]
)
def test_clipping_by_torch_is_refused_for_losses_with_weights(
    cluster: LocalCluster, clip: Callable[[Any, float], object]
) -> None:
    """After `session.clip_grad_norm` gradients are means, and may be clipped."""

    def body(session: Session, model: Any, _: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(loss_of(session, model, batch), weight=24)
            if batch.step < 2:
                session.clip_grad_norm(math.inf)
            clip(model.parameters(), 0.1)

    with pytest.raises(InvalidSpec, match=r"under ddp, in step 2; .*sums of losses.*math\.inf"):
        train_alone(cluster, "ddp", body)


def test_under_zero1_torch_cannot_clip_the_norm_of_one_members_gradients(
    cluster: LocalCluster,
) -> None:
    """Regression: after `session.clip_grad_norm` each member clipped by the norm of the parameters
    that it steps."""

    def body(session: Session, model: Any, _: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(loss_of(session, model, batch), weight=24)
            session.clip_grad_norm(math.inf)
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            if batch.step == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    with pytest.raises(InvalidSpec, match=r"under zero1, in step 2; .*that this member steps"):
        train_alone(cluster, "zero1", body)


@pytest.mark.parametrize("kind", ["None", "samples", "no gradient"])
def test_values_that_are_no_loss_are_refused(cluster: LocalCluster, kind: str) -> None:
    def body(session: Session, model: Any, _: Any, batch: shoal.Batch) -> None:
        with session.step():
            losses = cross_entropy(model(batch.inputs), batch.targets, reduction="none")
            given = {"None": None, "samples": losses, "no gradient": losses.mean().detach()}
            session.backward(given[kind])  # type: ignore[arg-type]

    with pytest.raises(InvalidSpec, match=r"of a value that is not a loss"):
        train_alone(cluster, "ddp", body)


def test_calling_sharded_layers_by_themselves_is_refused(cluster: LocalCluster) -> None:
    def body(session: Session, model: Any, _: Any, batch: shoal.Batch) -> None:
        with session.step():
            session.backward(cross_entropy(model[2:](model[:2](batch.inputs)), batch.targets))

    with pytest.raises(InvalidSpec, match=r"sharded over the members under fsdp.*model's forward"):
        train_alone(cluster, "fsdp", body)
