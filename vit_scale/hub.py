"""Whether the hub can be reached, asked once and briefly: its libraries would try for half a minute or more."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

TIMEOUT_SECONDS = 5


def hub_answers() -> bool:
    """Whether the hub can be reached now."""
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
    except Exception:  # noqa: BLE001 - any failure to connect means the same, and its class depends on the HTTP library
        return False
    return True


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Within this context what is in the local cache is used, without a try at the network."""
    import huggingface_hub

    places: list[Any] = [huggingface_hub.constants]
    if "datasets" in sys.modules:
        places.append(sys.modules["datasets"].config)
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value
