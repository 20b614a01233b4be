"""A plan and its measurements as one HTML page: gather (files), verdict, sections, figures, page (HTML)."""
