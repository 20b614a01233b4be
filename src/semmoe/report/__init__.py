"""A plan and its measurements as one HTML page: gather (files), figures (arrays to pictures), page (HTML)."""
