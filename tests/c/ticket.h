/* SPDX-License-Identifier: Apache-2.0 */
/* Leases with a ticket for any number of connections: for tests that are about something else. */
#ifndef ISW_TEST_TICKET_H
#define ISW_TEST_TICKET_H

#include "isw.h"

static inline int give_ticket(isw_store *store, uint64_t lease, char *ticket_out)
{
	const struct isw_ticket_config config = {.uses = UINT32_MAX};

	return isw_store_ticket(store, lease, &config, ticket_out);
}

static inline int lease_create(isw_store *store, uint32_t slots_max, char *ticket_out,
			       uint64_t *lease_out, struct isw_error *error)
{
	int code = isw_store_lease_create(store, slots_max, lease_out, error);

	return code != 0 ? code : give_ticket(store, *lease_out, ticket_out);
}

static inline int lease_renew(isw_store *store, uint64_t lease, uint32_t wait_ms_max,
			      char *ticket_out)
{
	int code = isw_store_lease_renew(store, lease, wait_ms_max);

	return code != 0 ? code : give_ticket(store, lease, ticket_out);
}

#endif
