"""Subjects of MMLU, MMLU-Pro and GPQA in a few broad fields, so that each holds enough requests."""

FIELDS = {
    "mathematics": ("algebra", "math", "statistics", "formal_logic"),
    "medicine": ("medicine", "anatomy", "clinical", "nutrition", "genetics", "virology", "aging", "health"),
    "science": (
        "physics",
        "chemistry",
        "biology",
        "astronomy",
        "engineering",
        "computer",
        "machine_learning",
        "mechanics",
        "optics",
        "relativity",
    ),
    "humanities": ("philosophy", "law", "moral", "history", "religion", "fallacies", "jurisprudence", "dispute"),
    "society": (
        "economic",
        "politics",
        "psychology",
        "sociology",
        "business",
        "management",
        "marketing",
        "accounting",
        "policy",
        "sexuality",
        "geography",
        "relations",
        "security",
        "econometrics",
    ),
}
REST = "other"


def field_of(subject: str) -> str:
    """The first field of which the subject's name holds a word."""
    name = subject.lower().replace(" ", "_")
    return next((field for field, words in FIELDS.items() if any(word in name for word in words)), REST)
