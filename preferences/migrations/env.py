"""Passes the store's open connection to Alembic. Migrations run in its transaction."""

from alembic import context

from preferences.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
