"""An HTTP proxy before engines in which nothing may be installed: it names the data-parallel rank of every request."""
