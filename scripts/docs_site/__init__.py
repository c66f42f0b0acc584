"""Source of the documentation as a site: its navigation, its settings, and pages that are made from the code."""
