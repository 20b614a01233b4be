"""An HTTP proxy that names the data-parallel rank of every request, for engines without the plug-in."""
