"""Options of `loadgen simulate` for fleets that change: migration, drains, autoscaling."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from loadgen import arguments
from loadgen.simulator import transfer
from loadgen.simulator.scaling import SCALING, Autoscaling

if TYPE_CHECKING:
    from loadgen.simulator.fleet import Drain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; `changes` reads them."""
    fleet = parser.add_argument_group("a fleet that changes")
    fleet.add_argument(
        "--migrate",
        nargs="?",
        type=migration,
        const={},
        metavar="KEY=VALUE,...",
        help="requests move between replicas; keys as in docs/simulator.md, none: the product's defaults",
    )
    fleet.add_argument(
        "--drain",
        type=span,
        nargs="+",
        default=[],
        metavar="REPLICA@SECOND[+SECONDS]",
        help="replica 1 drains from second 30 on, and serves again 60 s later: 1@30+60",
    )
    fleet.add_argument(
        "--autoscale",
        type=partial(arguments.policy, SCALING),
        metavar="NAME[:PARAMETER=VALUE,...]",
        help=f"{', '.join(SCALING.names())}; --replicas are those at the start",
    )
    defaults = Autoscaling()
    fleet.add_argument(
        "--min-replicas", type=arguments.whole, default=defaults.least, help="default: %(default)s; 0: to zero"
    )
    fleet.add_argument("--max-replicas", type=arguments.count, default=None, help="default: twice --replicas")
    for name, value, what in (
        ("startup-s", defaults.startup_s, "from the decision until a replica takes requests"),
        ("upscale-delay-s", defaults.up_s, "a step up must be wanted for so long"),
        ("downscale-delay-s", defaults.down_s, "a step down must be wanted for so long"),
    ):
        fleet.add_argument(f"--{name}", type=float, default=value, help=f"{what} (default: %(default)s)")


def span(text: str) -> tuple[int, float, float]:
    """Replica, begin and end, from `REPLICA@SECOND[+SECONDS]`."""
    try:
        replica, _, when = text.partition("@")
        begin, _, lasting = when.partition("+")
        return int(replica), float(begin), float(begin) + float(lasting or "inf")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write REPLICA@SECOND or REPLICA@SECOND+SECONDS") from None


def migration(text: str) -> dict[str, Any]:
    """The settings of `key=value,...`, which make a Migration."""
    try:
        settings = arguments.settings(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write KEY=VALUE,...") from None
    try:
        transfer.migration(settings)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return settings


def changes(args: argparse.Namespace) -> dict[str, Any]:
    """The fields `migration`, `drains` and `autoscaling` of the Fleet; ValueError for what does not fit."""
    from loadgen.simulator.fleet import Drain  # imports vLLM

    drains: tuple[Drain, ...] = tuple(Drain(*drain) for drain in args.drain)
    scaling = None
    if args.autoscale is not None:
        scaling = Autoscaling(
            args.autoscale,
            least=args.min_replicas,
            most=args.max_replicas or max(1, 2 * args.replicas),
            up_s=args.upscale_delay_s,
            down_s=args.downscale_delay_s,
            startup_s=args.startup_s,
        )
    moving = transfer.migration(args.migrate) if args.migrate is not None else None
    return {"migration": moving, "drains": drains, "autoscaling": scaling}
