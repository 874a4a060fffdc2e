"""Errors of the hub's clients in a line."""

OFFLINE = "HF_HUB_OFFLINE is set, and there is no earlier download"
UNREACHABLE = "the hub cannot be reached, and there is no earlier download"
REFUSED = "there is no such repository, or it needs `hf auth login` and its licence accepted"

# Names of the clients' exceptions, which several libraries define.
ABSENT = frozenset({"RepositoryNotFoundError", "GatedRepoError", "DatasetNotFoundError"})
AWAY = frozenset(
    {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError", "ConnectTimeout"}
)


def hub_reason(error: BaseException) -> str:
    """Returns why the hub provided nothing; for an error that is not known here, its type and text."""
    from huggingface_hub import constants  # takes a moment, and only errors need it

    names = {type(one).__name__ for one in _causes(error)}
    if constants.HF_HUB_OFFLINE and names & {*ABSENT, *AWAY}:
        return OFFLINE
    if names & ABSENT:
        return REFUSED
    if names & AWAY:
        return UNREACHABLE
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while (cause := found[-1].__cause__ or found[-1].__context__) is not None and cause not in found:
        found.append(cause)
    return found
