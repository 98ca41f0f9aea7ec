"""Weight synchronisation: from the learner's memory into engines that keep generating.

learner ─▶ StagedPublisher ─write─▶ transport ◀─open, verify─ Receiver ─pause, load, resume─▶ engine
                 └───announce──▶ Broadcaster ──newest, permit──▶ ┘
"""
