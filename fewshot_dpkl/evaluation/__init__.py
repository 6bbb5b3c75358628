"""From heads to figures: features, episodes, metrics, `evaluate`, results on disk, the report page."""
