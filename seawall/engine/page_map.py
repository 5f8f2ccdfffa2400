"""Who owns which page, as runs: the picture that a dashboard draws. Called on the core thread."""

import numpy as np

from seawall.cache.pages import FREE, QUARANTINE, PageLedger

# A picture has no use for more cells; of a larger pool every so many pages are shown.
MAX_CELLS = 8192


def page_map(ledger: PageLedger) -> dict[str, object]:
    """The owner of every page shown.

    Returns:
        "step": pages a cell; "owners": their names, free and quarantine first; "runs":
        [index of the owner, cells] in the order of the pages.
    """
    step = -(-ledger.num_pages // MAX_CELLS)
    owners = ledger.owners_of(np.arange(0, ledger.num_pages, step))
    handles = [FREE, QUARANTINE]
    handles += [int(owner) for owner in np.unique(owners) if owner not in handles]
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    lengths = np.diff(starts, append=len(owners))
    index = {handle: at for at, handle in enumerate(handles)}
    return {
        "step": step,
        "owners": ["free", "quarantine", *(ledger.label_of(handle) for handle in handles[2:])],
        "runs": [
            [index[int(owners[start])], int(length)]
            for start, length in zip(starts, lengths, strict=True)
        ],
    }
