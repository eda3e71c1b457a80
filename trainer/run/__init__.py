"""A configuration becomes a result, one file a stage, read in this order:

    config/compose   what the user typed -> Run
    beginning.py     what lies in the folder -> Beginning: fresh, from a checkpoint, or finished
    prepare.py       all that needs no weights -> Prepared
    build.py         weights, adapter, optimizer -> Ready, with the Loop in it
    restore.py       what of a checkpoint comes back, or a fresh manifest
    train.py         the way through all of them, and training: Ready -> State
    export.py        adapter/ or model/, summary.json and the last table

journal.py is what a run tells on the way.
"""
