"""Text of a data set on the Hub, streamed by the package `datasets`, never downloaded whole."""

from collections.abc import Callable, Iterator
from itertools import islice

from accel_gpt.config.data import PrepareConfig
from accel_gpt.errors import AccelGPTError, UserError


def hub_rows(
    config: PrepareConfig,
    start: int,
    skip: Callable[[str], None],
) -> Iterator[tuple[int, str]]:
    """(number, text) of the rows of a Hub data set from number `start` on, as they come.

    `skip` is called for values that are no text.
    """
    field, where = config.text_field, f"data set {config.dataset}"
    try:
        import datasets
    except ImportError:
        raise UserError(
            "data.prepare.source is dataset, which needs the package datasets; pip install datasets"
        ) from None
    try:
        data = datasets.load_dataset(
            config.dataset, config.dataset_config, split=config.dataset_split, streaming=True
        )
        rows = data.skip(start) if hasattr(data, "skip") else islice(data, start, None)
        for number, row in enumerate(rows, start):
            if field not in row:
                raise UserError(
                    f"data.prepare.text_field is {field!r}, which {where} does not have; its "
                    f"columns: {', '.join(row)}"
                )
            if row[field] is None or isinstance(row[field], str):
                yield number, row[field] or ""
            else:
                skip(f"row {number} of {where} has {row[field]!r:.50} in column {field}, not text")
    except AccelGPTError:
        raise
    except Exception as error:  # of datasets, pyarrow, fsspec, huggingface_hub, httpx
        raise UserError(hub_sentence(config, error)) from None


def hub_sentence(config: PrepareConfig, error: Exception) -> str:
    """What went wrong with a Hub data set, and what to do, by the classes of the errors."""
    names, texts = set[str](), list[str]()
    link: BaseException | None = error
    while link is not None and len(texts) < 20:
        names |= {kind.__name__ for kind in type(link).__mro__}
        texts.append(str(link))
        link = link.__cause__ or link.__context__
    log_in = "hf auth login, or set HF_TOKEN"
    advice = "check its id, configuration and split"
    offline = {"OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException"}
    if "GatedRepoError" in names or any("gated dataset" in text for text in texts):
        advice = f"it is gated: accept its terms at https://hf.co/datasets/{config.dataset}, then "
        advice += log_in
    elif names & {"RepositoryNotFoundError", "DatasetNotFoundError", "RevisionNotFoundError"}:
        advice = f"it does not exist, or is private: check its id; for a private one {log_in}"
    elif names & offline or {"Timeout", "LocalEntryNotFoundError"} & names:
        advice = "the Hub was not reached: check the network, and that HF_HUB_OFFLINE is not set"
    return (
        f"data set {config.dataset} (config {config.dataset_config}, split {config.dataset_split}) "
        f"could not be read from the Hub; {advice} ({type(error).__name__}: {error})"
    )
