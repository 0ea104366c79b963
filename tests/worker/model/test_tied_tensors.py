"""Names of a model's tensors, and tensors that share memory without being one."""

from collections.abc import Callable

import pytest
import torch
from support.models import tied_models
from torch import Tensor, nn

from shoal.layouts.base import materialise
from shoal.layouts.optimizer_binding import MetaModel
from shoal.model.tied_tensors import persistent_buffers, refuse_hidden_ties, tied, with_tied_names
from shoal.state.host_copies import state_dict_on_host
from shoal_proto.errors import InvalidSpec


def test_first_and_further_names_are_together_those_of_the_state_dict() -> None:
    model, _ = tied_models.knotted(0)
    further = tied(model)
    assert further == tied_models.TIES
    once = {**dict(model.named_parameters()), **persistent_buffers(model)}
    named = with_tied_names(once, further)
    assert once.keys().isdisjoint(further)
    assert {name: id(tensor) for name, tensor in named.items()} == {
        name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()
    }


def test_copies_without_weights_are_tied_like_the_model_each_time() -> None:
    """A session makes a copy in each generation; the model's own weights are gone by then."""
    model, optimizer = tied_models.knotted(0)
    meta_model = MetaModel(model, optimizer)
    for _ in range(2):
        copied = meta_model.copy()
        assert tied(copied) == tied_models.TIES
        materialise(copied, torch.device("cpu"))
        assert tied(copied) == tied_models.TIES
        held, own = copied.state_dict(), model.state_dict()
        assert torch.equal(held["two_names.behind"], own["two_names.behind"])
        meta_model.forget_weights()
        assert tied(model) == tied_models.TIES


def test_a_state_on_the_host_is_a_copy_and_has_the_ties() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tied_models.knotted(0)[0].to(device)
    state = state_dict_on_host(model)
    assert list(state) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert state[name].device.type == "cpu"
        assert torch.equal(state[name], tensor.cpu())
        assert state[name].data_ptr() != tensor.data_ptr()
    assert all(state[name] is state[first] for name, first in tied_models.TIES.items())


class Two(nn.Module):
    def __init__(self, one: Tensor, other: Tensor) -> None:
        super().__init__()
        for name, tensor in (("one", one), ("other", other)):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


@pytest.mark.parametrize(
    "other",
    [
        lambda one: nn.Parameter(one.data),
        lambda one: nn.Parameter(one.data.t()),
        lambda one: nn.Parameter(one.data[2:4]),
        lambda one: one.data,
        lambda one: one.data.view(-1)[5:],
    ],
    ids=["data", "transposed", "rows", "buffer", "part in a buffer"],
)
def test_memory_that_parameters_share_is_found(other: Callable[[Tensor], Tensor]) -> None:
    one = nn.Parameter(torch.ones(5, 4))
    with pytest.raises(InvalidSpec, match="one and other share memory"):
        refuse_hidden_ties(Two(one, other(one)))


def test_neighbours_in_memory_and_true_ties_are_accepted() -> None:
    """The weights of an LSTM in cuDNN, and columns of one matrix, are neighbours in memory."""
    memory = torch.zeros(6, 4)
    one = nn.Parameter(memory[:3])
    for other in (nn.Parameter(memory[3:]), one, torch.ones(()), nn.Parameter(torch.empty(0))):
        refuse_hidden_ties(Two(one, other))
    refuse_hidden_ties(Two(nn.Parameter(memory[:, :2]), nn.Parameter(memory[:, 2:])))
    # Buffers are not trained.
    refuse_hidden_ties(Two(memory, memory[0]))
