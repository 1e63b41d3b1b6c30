"""``--check-images``: all images of a folder are read before training, each by one rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from aladdin_mpi.control.exchange import all_or_none, broadcast, gather
from aladdin_mpi.data import imagefolder
from aladdin_mpi.data.imagefolder import Fault, SplitListing
from aladdin_mpi.data.loader_processes import Start
from aladdin_mpi.data.loading import load_in_order
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.process import console
from aladdin_mpi.transport.base import Transport

AT_A_TIME = 64
"""Images that a loader process reads before it reports."""
MOST_NAMED = 1000


def check_images(options: RunOptions, transport: Transport) -> tuple[Fault, ...] | None:
    """Return the unreadable images, the same on all ranks; None without ``--check-images``.

    Raises:
        UserError: at rank 0, names all of them, if they are not to be skipped.
        RefusedError: then at the others.
    """
    if not options.check_images:
        return None
    listings, _ = all_or_none(transport, lambda: imagefolder.list_splits(options.data_dir))
    count = sum(len(listing.names) for listing in listings)
    if transport.rank == 0 and not options.quiet:
        console.say(f"--check-images: reading {count} images", sys.stdout)
    mine = all_or_none(transport, lambda: _faults(listings, options, transport))
    found = [each for part in gather(transport, mine) for each in part or ()]
    faults = tuple(sorted(Fault(*each) for each in broadcast(transport, found)))
    if faults and options.corrupt_images == "stop":
        all_or_none(transport, lambda: _refuse(listings, faults, count))
    return faults


def _faults(
    listings: Sequence[SplitListing], options: RunOptions, transport: Transport
) -> list[Fault]:
    """Return the unreadable images of this rank's part: every n-th image."""
    places = [
        (split, index)
        for split, listing in enumerate(listings)
        for index in range(transport.rank, len(listing.names), transport.size)
    ]
    pieces = [places[i : i + AT_A_TIME] for i in range(0, len(places), AT_A_TIME)]
    start = Start(options.loader_start_method, tells=transport.rank == 0)
    check = partial(_faults_among, listings)
    loaded = load_in_order(check, pieces, options.loader_workers, start)
    return [each for piece in loaded for each in piece]


def _faults_among(
    listings: Sequence[SplitListing], places: Sequence[tuple[int, int]]
) -> list[Fault]:
    reasons = ((place, imagefolder.fault(listings[place[0]].path(place[1]))) for place in places)
    return [Fault(*place, why) for place, why in reasons if why is not None]


def _refuse(listings: Sequence[SplitListing], faults: Sequence[Fault], count: int) -> None:
    named = [f"\n  {listings[each.split].path(each.place)}: {each.why}" for each in faults]
    more = f"\n  and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    raise UserError(
        f"--check-images: {len(faults)} of {count} images cannot be read; replace or remove them, "
        f"or add --corrupt-images skip:{''.join(named[:MOST_NAMED])}{more}"
    )
