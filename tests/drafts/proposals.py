"""The proposals of a draft, to compare with those of another implementation."""


def proposals_of(batch) -> list[list[int]]:
    """Return what each round of the only row proposes."""
    rounds, propose = [], batch.draft.propose

    def noting(state, gamma):
        proposal = propose(state, gamma)
        rounds.append(proposal.tokens_BG[0].tolist())
        return proposal

    batch.draft.propose = noting
    batch.decoder.generate(batch.draft)
    return rounds
