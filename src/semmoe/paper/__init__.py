"""The paper's own method: placement, policies (Algorithms 2 and 3), tables."""
