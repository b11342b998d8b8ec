"""What a checkpoint was trained on: names, Hub data sets, tokens of folders at hand."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_gpt.data.remote.folder import is_url
from accel_gpt.data.shards import INDEX, open_split, read_index
from accel_gpt.errors import UserError
from accel_gpt.hub.privacy import hub_dataset
from accel_gpt.redact import public_name, public_source
from accel_gpt.training.state import TrainState


@dataclass(frozen=True)
class Source:
    """One source of the data; None: not known."""

    name: str
    share: float = 1.0
    hub_id: str | None = None
    train_tokens: int | None = None
    val_tokens: int | None = None


def sources_of(state: TrainState) -> tuple[Source, ...]:
    """What was trained on, with the tokens of those folders that are at hand and the same."""
    flat = state.config
    train = flat.get("data.train")
    stream = flat.get("data.train.dataset") or flat.get("data.train.path")
    if stream:
        hub_id = hub_dataset(str(stream)) if stream != flat.get("data.train.path") else None
        return (Source(hub_id or public_name(str(stream)) or "text", hub_id=hub_id),)
    places = [s.get("path") for s in train] if isinstance(train, list) else [train]
    opened = [look_at(str(place)) for place in places if place]
    noted = state.data_sources or [{"name": "data", "weight": 1.0}]
    total = sum(float(source["weight"]) for source in noted)
    found = []
    for source in noted:
        fingerprint, only = source.get("fingerprint"), len(noted) == 1
        at_hand = next((one for print_, one in opened if print_ == fingerprint), None)
        hub_id = at_hand.hub_id if at_hand else None
        if only and not at_hand:
            hub_id = hub_of_config(flat)
        name = public_name(str(train)) if only else public_source(str(source["name"]))
        tokens = (at_hand.train_tokens, at_hand.val_tokens) if at_hand else (None, None)
        found.append(Source(name or "data", float(source["weight"]) / total, hub_id, *tokens))
    return tuple(found)


def hub_of_config(flat: Mapping[str, Any]) -> str | None:
    """The Hub data set that the config names, if any."""
    train, prepare = flat.get("data.train"), flat.get("data.prepare.source")
    if isinstance(train, str) and train.startswith("hf://"):
        return hub_dataset(train)
    return hub_of_prepared(
        {key: flat.get(f"data.prepare.{key}") for key in ("path", "dataset")} | {"source": prepare}
    )


def hub_of_prepared(prepared: Mapping[str, Any]) -> str | None:
    """The Hub data set that a folder was prepared from, if any."""
    if prepared.get("source") == "dataset":
        return hub_dataset(prepared.get("dataset"))
    path = str(prepared.get("path") or "")
    return hub_dataset(path) if prepared.get("source") and path.startswith("hf://") else None


def look_at(place: str) -> tuple[str, Source]:
    """Fingerprint and figures of a data folder; "" where it is not at hand, or not one of ours."""
    try:
        if is_url(place) or not (Path(place) / INDEX).is_file():
            return "", Source("")
        train, index = open_split(place, "train"), read_index(Path(place))
        val = open_split(place, "val").tokens if index["splits"].get("val") else None
    except (UserError, OSError):
        return "", Source("")
    hub_id = hub_of_prepared(index.get("prepared") or {})
    return train.fingerprint, Source("", 1.0, hub_id, train.tokens, val)
