"""What a person reads: tables (`text`), pictures (`figures`), one record of results (`summary`)."""
