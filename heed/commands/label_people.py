"""`heed label`: links and accounts of labelers and leads, and their personal data."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stages.progress import console

if TYPE_CHECKING:
    from preferences.accounts import Accounts
    from preferences.page.config import LabelingConfig

people_app = typer.Typer()

Store = Annotated[str, typer.Option(help="The label store: a file path or a database URL.", show_default=False)]
LabelToml = Annotated[Path | None, typer.Option(help="TOML file: title, instructions, flags, ...; see docs/labels.md.")]
PublicUrl = Annotated[str, typer.Option(help="The server's address for its users, such as https://labels.example.org.")]


@people_app.command("invite")
def invite_labeler(
    name: Annotated[str, typer.Argument(help="The account's name. Pages show it; exports have a pseudonym.")],
    store: Store,
    lead: Annotated[bool, typer.Option("--lead", help="Invite a lead instead of a labeler.")] = False,
    config: LabelToml = None,
    public_url: PublicUrl = "",
) -> None:
    """Make a one-time link for somebody new, or for somebody who lost their key. It voids an older link."""
    server = labeling_config(config, public_url, [], []).server
    with _people(store) as accounts:
        link = server.link(accounts.invite(name, "lead" if lead else "labeler"))
    typer.echo(f"Send this link to {name}. It works once, within a week, and shows the key to sign in with:\n{link}")
    if not server.public_url:
        console.print("It points to a server on this machine; use --public-url for another address.", markup=False)


@people_app.command("links")
def list_links(store: Store) -> None:
    """List one-time links that nobody has used yet."""
    from datetime import UTC, datetime

    with _people(store) as accounts:
        links = accounts.links()
    for link in links:
        until = datetime.fromtimestamp(link.expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        typer.echo(f"{link.name}: {link.role}, until {until}, invited by {link.invited_by or 'unknown'}")
    if not links:
        console.print("there are no unused links")


@people_app.command("revoke")
def revoke_link(name: Annotated[str, typer.Argument(help="The name that the link is for.")], store: Store) -> None:
    """Void an unused one-time link. To close an account, use the People page."""
    with _people(store) as accounts:
        accounts.revoke(name)
    typer.echo(f"the link of {name} no longer works")


@people_app.command("person")
def export_person(
    name: Annotated[str, typer.Argument(help="A labeler's or lead's name.")],
    store: Store,
    out: Annotated[Path, typer.Option(help="A new .json file.")],
) -> None:
    """Export everything that the store holds about one person."""
    from files.atomic import atomic_file

    if out.exists():
        raise ValueError(f"{out}: already exists; a new path was expected")
    with _people(store) as accounts:
        held = accounts.held_about(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as temporary:
        temporary.write_text(json.dumps(held, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    typer.echo(f"{len(held['judgments']):,} judgments of {name} ({held['pseudonym']}), and everything else, in {out}")


@people_app.command("erase")
def erase_person(
    name: Annotated[str, typer.Argument(help="A labeler's or lead's name.")],
    store: Store,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Erase a person: name, account, links and notes. Judgments stay, under a pseudonym."""
    with _people(store) as accounts:
        if name not in accounts.pseudonyms():
            raise ValueError(f"name {name!a}: the store holds nothing under this name")
        if not yes:
            typer.confirm(f"Erase {name} from {store}? It cannot be undone.", abort=True)
        pseudonym = accounts.erase(name)
    typer.echo(f"{name} is erased; the judgments stay, as those of {pseudonym}. Backups still hold the name.")


@contextmanager
def _people(store: str) -> "Iterator[Accounts]":
    from preferences.accounts import Accounts
    from preferences.database import require_store

    require_store(store)
    accounts = Accounts(store)
    try:
        yield accounts
    finally:
        accounts.close()


def labeling_config(
    path: Path | None, public_url: str, proxies: Sequence[str], hosts: Sequence[str]
) -> "LabelingConfig":
    """Returns the file's configuration, with the server options of the command line."""
    from preferences.page.config import LabelingConfig

    config = LabelingConfig.load(path) if path is not None else LabelingConfig()
    options = {"public_url": public_url, "trusted_proxies": tuple(proxies), "trusted_hosts": tuple(hosts)}
    return config.with_server({name: value for name, value in options.items() if value})
