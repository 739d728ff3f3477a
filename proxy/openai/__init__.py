"""The wire formats without the wire: what a request asks for, what a response says, how an error looks."""
