"""The hyperparameters of a job, read from the fields that its members agreed on."""

from shoal_server.status.hyperparameters import hyperparameters

ADAM = "AdamW(amsgrad=False betas=(0.9, 0.999) foreach=True lr=0.001 weight_decay={} parameters=4"


def test_settings_of_the_optimizer_are_listed_separately() -> None:
    """Well-known ones are first. Settings that do not change the result, and fields about the
    model, are left out."""
    fields = {
        "schema": "ab12",
        "torch": "2.13.0",
        "seed": "0",
        "optimizer": f"{ADAM.format(0.0)})",
        "strategy": "ddp",
        "global_batch": "96",
    }
    found = hyperparameters(fields)
    assert list(found)[:5] == ["strategy", "global_batch", "optimizer", "lr", "weight_decay"]
    assert (found["optimizer"], found["lr"], found["betas"]) == ("AdamW", "0.001", "(0.9, 0.999)")
    assert {"schema", "torch", "foreach", "parameters"}.isdisjoint(found)


def test_a_setting_that_differs_between_groups_is_shown_for_each() -> None:
    text = f"{ADAM.format(0.0)} | {ADAM.format(0.1).removeprefix('AdamW(')})"
    found = hyperparameters({"optimizer": text})
    assert (found["weight_decay"], found["lr"]) == ("0.0 | 0.1", "0.001")


def test_an_optimizer_text_of_another_form_is_shown_unchanged() -> None:
    """The text may be of several optimizers, cut, or of a later release."""
    for text in ("d: SGD(lr=1 parameters=2); g: SGD(lr=2 parameters=2)", "SGD(lr=1... 5f", ""):
        assert hyperparameters({"optimizer": text}) == {"optimizer": text}


def test_a_field_of_the_strategy_is_not_replaced_by_a_setting_of_its_name() -> None:
    fields = {"schedule": "constant", "optimizer": "Own(schedule=other lr=1 parameters=2)"}
    assert hyperparameters(fields)["schedule"] == "constant"
