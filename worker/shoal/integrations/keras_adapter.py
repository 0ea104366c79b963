"""The FrameworkAdapter of `shoal.model.frameworks` for Keras."""

from typing import Any

from shoal.integrations import keras, keras_session
from shoal.integrations.keras import KerasModule


def as_torch(model: Any) -> KerasModule:
    """See `FrameworkAdapter`."""
    return KerasModule(model)


def distribute_static(model: Any, strategy: Any, backend: str | None) -> Any:
    """See `FrameworkAdapter`."""
    return keras.distribute(model, strategy, backend=backend)


def distribute_in_session(session: Any, model: Any, strategy: Any, **options: Any) -> Any:
    """See `FrameworkAdapter`."""
    return keras_session.distribute(session, model, strategy, **options)
