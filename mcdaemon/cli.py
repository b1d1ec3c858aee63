"""The command line. One place turns errors into a sentence and an exit status."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Optional

from mcdaemon import __version__, assembly
from mcdaemon import settings as settings_file
from mcdaemon.agent import Agent, make_places, only_one, runs, settle, wake
from mcdaemon.context import RUNTIME, Context
from mcdaemon.decide import Step, decide
from mcdaemon.errors import Failure, Held, Irreconcilable, Transient
from mcdaemon.observe import Observer, drift
from mcdaemon.perform import Performer
from mcdaemon.report import status
from mcdaemon.report.endpoint import Endpoint
from mcdaemon.report.metrics import Board
from mcdaemon.report.notify import Notifier
from mcdaemon.reporter import Reporter
from mcdaemon.update import journal
from mcdaemon.update.payload import wanted

OK, FAILED, USAGE, HELD, REFUSED = 0, 1, 2, 3, 4
"""Exit statuses: done; an error; wrong usage; waits for something; the desired config cannot be reached."""


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = parser().parse_args(argv)
    _log_to_stderr(arguments.verbose)
    try:
        return int(arguments.run(arguments))
    except Failure as error:
        print(f"mcdaemon: {error}", file=sys.stderr)
        return _exit_status(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _exit_status(error: Failure) -> int:
    if isinstance(error, (Held, Transient)):
        return HELD
    return REFUSED if isinstance(error, Irreconcilable) else FAILED


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="mcdaemon",
        description="Brings this node to its MachineConfig.",
        epilog="Exit status: 0 done, 1 error, 2 usage, 3 waiting for something outside, 4 config refused.",
    )
    top.add_argument("--settings", default=settings_file.PATH, metavar="FILE", help="settings file (%(default)s)")
    top.add_argument("-v", "--verbose", action="store_true", help="say more")
    top.add_argument("--version", action="version", version=f"mcdaemon {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="bring the node to the desired config, and keep it there")
    run.add_argument("--once", action="store_true", help="take every step that can be taken now, then end")
    run.set_defaults(run=_run)
    plan = commands.add_parser("plan", help="show what an update would do; changes nothing")
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(run=_plan)
    show = commands.add_parser("status", help="show what the agent does and why it waits")
    show.add_argument("--json", action="store_true")
    show.set_defaults(run=_status)
    resolve = commands.add_parser("resolve", help="show where an image is complete; fetches nothing")
    resolve.add_argument("pullspec")
    resolve.add_argument("--json", action="store_true")
    resolve.set_defaults(run=_resolve)
    validate = commands.add_parser("validate", help="compare the running root with the config that it carries")
    validate.set_defaults(run=_validate)
    retry = commands.add_parser("retry", help="try a target again that was taken back or left")
    retry.set_defaults(run=_retry)
    commands.add_parser(
        "early", help="(for mcdaemon-early.service) complete or put back files before boot goes on"
    ).set_defaults(run=_early)
    return top


def _log_to_stderr(verbose: bool) -> None:
    # The journal adds time and unit; a terminal needs neither.
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.DEBUG if verbose else logging.INFO)
    for noisy in ("urllib3", "requests"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _context(arguments: argparse.Namespace) -> Context:
    return assembly.assemble(settings_file.load(arguments.settings), RUNTIME)


def _run(arguments: argparse.Namespace) -> int:
    _require_root()
    with only_one(RUNTIME):
        context = _context(arguments)
        make_places(context)
        board = Board()
        reporter = Reporter(
            Path(context.settings.state_dir), RUNTIME, board, context.settings.hold.degraded_after_seconds
        )
        agent = Agent(context, reporter, Notifier.from_environment())
        if arguments.once:
            return _once(agent)
        with _metrics(context, board) as serve:
            agent.run(serve)
        return OK


def _once(agent: Agent) -> int:
    decision, error = agent.run_once()
    if error is not None:
        return _exit_status(error)
    if decision is None or decision.step is Step.REJECT:
        return REFUSED
    if decision.step is Step.HOLD:
        return HELD
    return FAILED if decision.degraded else OK


@contextlib.contextmanager
def _metrics(context: Context, board: Board) -> Iterator[Callable[[], None]]:
    """What to call to serve metrics, again and again: the port may be taken for a while (a machine-config-daemon that
    is being replaced), and a node must not miss an update for want of a port."""
    listen = context.settings.metrics
    endpoint = Endpoint(board, listen.address, listen.port)
    complaints: set[str] = set()

    def serve() -> None:
        if not listen.listen:
            return
        try:
            endpoint.start()
        except Failure as error:
            if str(error) not in complaints:
                complaints.add(str(error))
                logging.getLogger("mcdaemon").error("%s", error)

    serve()
    try:
        yield serve
    finally:
        endpoint.stop()


def _plan(arguments: argparse.Namespace) -> int:
    _require_root()
    context = _context(arguments)
    make_places(context)
    facts = Observer(context, look_only=True).observe()
    decision = decide(facts.observation)
    plan = facts.plan
    if arguments.json:
        print(
            json.dumps(
                {
                    "step": decision.step.value,
                    "why": decision.why,
                    "current": facts.current.name if facts.current else None,
                    "desired": facts.desired.config.name if facts.desired else None,
                    "plan": None if plan is None else plan.lines(),
                    "digest": facts.resolution.digest if facts.resolution else "",
                    "remarks": list(facts.remarks),
                },
                indent=1,
            )
        )
    else:
        print(f"next step: {decision.step.value}: {decision.why}")
        for line in [] if plan is None else plan.lines():
            print(f"  {line}")
        if facts.resolution is not None:
            print(f"  the image is {facts.resolution.digest}, from {facts.resolution.origin()}")
        for remark in facts.remarks:
            print(f"  warning: {remark}")
    return REFUSED if decision.step is Step.REJECT else HELD if decision.step is Step.HOLD else OK


def _status(arguments: argparse.Namespace) -> int:
    found = status.load(RUNTIME / "status.json")
    if found is None:
        return _no_status(arguments)
    if not runs(RUNTIME):
        print("mcdaemon: no agent is running; this is what the last one said", file=sys.stderr)
    with contextlib.suppress(Failure):  # an agent that was killed in a drain could not say so
        path = Path(settings_file.load(arguments.settings).state_dir) / "journal.json"
        found = dataclasses.replace(found, out_of_service=journal.out_of_service(path))
    print(json.dumps(dataclasses.asdict(found), indent=1) if arguments.json else "\n".join(found.lines()))
    return OK


def _no_status(arguments: argparse.Namespace) -> int:
    path = Path(settings_file.load(arguments.settings).state_dir) / "journal.json"
    record, alien = journal.load(path)
    flying = "" if record.update is None else f", and an update to {record.update.name} is in flight"
    print(
        f"mcdaemon: no round was made since this boot{flying}; start mcdaemon.service"
        f"{', which goes on with it,' if flying else ''} or use `mcdaemon run --once`",
        file=sys.stderr,
    )
    if alien:
        print(f"  {alien}", file=sys.stderr)
    if journal.out_of_service(path):
        print(f"  {status.OUT_OF_SERVICE}", file=sys.stderr)
    if record.failed is not None:
        print(f"  failed target    {record.failed}", file=sys.stderr)
    return FAILED


def _resolve(arguments: argparse.Namespace) -> int:
    resolution = assembly.resolver(settings_file.load(arguments.settings)).resolve(arguments.pullspec)
    if arguments.json:
        print(
            json.dumps(
                {
                    "reference": str(resolution.reference),
                    "digest": resolution.digest,
                    "complete": resolution.complete,
                    "size": resolution.size,
                    "origin": resolution.origin() if resolution.complete else "",
                    "sources": [
                        {"source": f.source.value, "place": f.place, "verdict": f.verdict.value, "reason": f.reason}
                        for f in resolution.findings
                    ],
                },
                indent=1,
            )
        )
    else:
        print(f"{resolution.pinned}: {'complete' if resolution.complete else 'complete nowhere'}")
        for finding in resolution.findings:
            print(f"  {finding}")
        if resolution.complete:
            print(f"  is staged from {resolution.origin()}")
    return OK if resolution.complete else HELD


def _validate(arguments: argparse.Namespace) -> int:
    _require_root()
    context = _context(arguments)
    facts = Observer(context).carried()
    if facts is None:
        print("mcdaemon: this root carries no config yet", file=sys.stderr)
        return FAILED
    lines = drift(context, facts)
    expected = len(wanted(facts, context.root, context.root))
    for line in lines:
        print(line)
    print(f"{facts.name}: {expected} paths looked at, {len(lines)} wrong")
    return FAILED if lines else OK


def _retry(arguments: argparse.Namespace) -> int:
    """The agent writes the journal, nobody else: it is asked, and does it in its next round."""
    _require_root()
    context = _context(arguments)
    make_places(context)
    record, alien = journal.load(context.journal)
    if alien:
        print(f"mcdaemon: {alien}", file=sys.stderr)
    what, identity = str(record.failed or ""), record.failed.desired if record.failed else ""
    confirmed = record.confirmed
    if not what and confirmed and confirmed.desired and confirmed.deployment != context.machine.booted()[1]:
        what, identity = f"{confirmed.name}: an older deployment is booted", confirmed.desired
    if not what:
        print("no target is remembered as failed, and no older deployment was chosen to boot")
        return OK
    context.retry.touch()
    when = "now" if wake(RUNTIME) else "with the next `mcdaemon run`"
    if _desires(context, identity):
        print(f"will be tried again {when}: {what}")
    else:
        print(f"nothing is tried again, for this config is not desired; its record goes {when}: {what}")
    return OK


def _desires(context: Context, identity: str) -> bool:
    try:
        desired = context.source.read()
    except Failure:
        return False
    return desired is not None and desired.config.identity == identity


def _early(arguments: argparse.Namespace) -> int:
    """Broken settings must not keep an incomplete root from being completed: what is needed of them has a default."""
    _require_root()
    try:
        settings = settings_file.load(arguments.settings)
    except Failure as error:
        print(f"early: {error}; the defaults are used", file=sys.stderr)
        settings = settings_file.Settings()
    context = assembly.assemble(dataclasses.replace(settings, disruption=settings_file.Disruption()), RUNTIME)
    make_places(context)
    outcome = settle(context)
    print(f"early: {outcome.action.value}: {outcome.why}", file=sys.stderr)
    if outcome.reboot:
        Performer(context).reboot_at_once()
    return OK


def _require_root() -> None:
    if os.geteuid() != 0:
        raise Failure("cannot do this as an ordinary user", "run it as root")


if __name__ == "__main__":
    sys.exit(main())
