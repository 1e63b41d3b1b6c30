"""The command where a cluster is described: understand, tell, write."""

from __future__ import annotations

from aladdin_mpi.probing import cluster_file, described_cluster
from aladdin_mpi.probing.cluster_file import check, check_free, rendered, write
from aladdin_mpi.probing.options import ProbeOptions


def describe(options: ProbeOptions) -> None:
    """Write the file of a described cluster, and print what was understood.

    Raises:
        UserError: the file is there already, or cannot be written.
    """
    check_free(options.out, options.overwrite)
    source = "Described" + (f': "{options.describe}"' if options.describe else " by options") + "."
    text = rendered(source, described_cluster.sections(options))
    check(text, str(options.out))
    print("understood:")
    for line in described_cluster.understood(options):
        print(f"    {line}")
    left_out = described_cluster.left_out(options)
    if left_out:
        print(f"not said, so left to the defaults: {', '.join(left_out)}")
    tell_written(write(options.out, text, options.overwrite), options)


def tell_written(path: object, options: ProbeOptions) -> None:
    """Say where the file is, and how to go on."""
    if path != options.out:
        print(f"{options.out} has come from elsewhere meanwhile, and is left as it is")
    print(f"wrote {path}; to use it: {cluster_file.command(str(path))}")
