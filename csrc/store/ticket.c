// SPDX-License-Identifier: Apache-2.0
/*
 * Tickets: the names under which connections of a lease are opened. Each names one connection by
 * its number, is good for a while and for a number of uses. All have their place in the lease.
 *
 * Tickets travel in the clear when they are shown. Whoever reads one may be faster than its owner,
 * who is refused then, gets a later ticket, and with it the connection: a later ticket is given
 * only when every connection that an earlier one opened has ended.
 */
#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include "store/store.h"

#define NS_PER_MS 1000000ull

_Static_assert(ISW_TICKET_NUMBERS <= 64, "struct iswi_lease.tickets_live has 64 bits");

/* text_out: ISW_TICKET_TEXT_BYTES. Blocks only until the kernel's random source is ready. */
static int make_text(char *text_out)
{
	static const char digits[] = "0123456789abcdef";
	unsigned char bytes[ISWI_TICKET_BYTES / 2];

	if (getrandom(bytes, sizeof(bytes), 0) != (ssize_t)sizeof(bytes))
		return -EIO;
	for (unsigned i = 0; i < sizeof(bytes); i++) {
		text_out[2 * i] = digits[bytes[i] >> 4];
		text_out[2 * i + 1] = digits[bytes[i] & 15];
	}
	text_out[ISWI_TICKET_BYTES] = '\0';
	return 0;
}

/* Takes the same time for every name, so that a guess does not learn how much of it was right. */
static bool text_is(const char *text, const char *name)
{
	unsigned char differs = 0;

	for (unsigned i = 0; i < ISWI_TICKET_BYTES; i++)
		differs |= (unsigned char)(text[i] ^ name[i]);
	return differs == 0;
}

static void forget(struct iswi_lease *lease, uint32_t number)
{
	lease->tickets[number] = (struct iswi_ticket){0};
	lease->tickets_live &= ~(1ull << number);
}

struct iswi_lease *iswi_ticket_find(isw_store *store, const char *name, size_t name_bytes,
				    uint32_t *number_out)
{
	const uint64_t now_ns = store->clock->now_ns(store->clock->ctx);
	struct iswi_lease *found = NULL;

	if (name_bytes != ISWI_TICKET_BYTES)
		return NULL;
	for (uint32_t i = 0; i < store->config.leases_max; i++) {
		struct iswi_lease *lease = store->leases[i];

		if (lease == NULL || !lease->open || lease->tickets_live == 0)
			continue;
		for (uint32_t k = 0; k < ISW_TICKET_NUMBERS; k++) {
			if ((lease->tickets_live & 1ull << k) == 0)
				continue;
			if (now_ns >= lease->tickets[k].end_ns) {
				forget(lease, k);
			} else if (text_is(lease->tickets[k].text, name)) {
				found = lease;
				*number_out = k;
			}
		}
	}
	return found;
}

void iswi_ticket_use(struct iswi_lease *lease, uint32_t number)
{
	if (--lease->tickets[number].uses == 0)
		forget(lease, number);
}

/* store->lock held. How many connections tickets of that number have opened; shut: ends them. */
static uint32_t holders(struct iswi_lease *lease, uint32_t number, bool shut)
{
	uint32_t count = 0;

	for (struct iswi_store_conn *bound = lease->conns; bound != NULL; bound = bound->next) {
		if (bound->ticket != number)
			continue;
		count++;
		if (shut)
			iswi_nbd_conn_shutdown(bound->conn);
	}
	return count;
}

/* store->lock held, and dropped while waiting: the lease may end or be renewed meanwhile. */
static int end_holders(struct iswi_lease *lease, uint32_t number, uint32_t wait_ms_max)
{
	const struct timespec deadline = iswi_store_deadline(wait_ms_max);
	isw_store *store = lease->store;
	int err = 0;

	if (holders(lease, number, true) == 0)
		return 0;
	iswi_lease_enter(lease);
	while (holders(lease, number, false) > 0 && !lease->dying && err == 0)
		err = -pthread_cond_timedwait(&store->changed, &store->lock, &deadline);
	if (lease->dying)
		err = -ENOENT;
	else if (holders(lease, number, false) == 0)
		err = 0;
	iswi_lease_leave(lease);
	return err;
}

int isw_store_ticket(isw_store *store, uint64_t id, const struct isw_ticket_config *config,
		     char *ticket_out)
{
	struct iswi_ticket ticket = {.uses = config->uses, .end_ns = UINT64_MAX};
	const uint32_t number = config->number;
	struct iswi_lease *lease;
	int err;

	if (number >= ISW_TICKET_NUMBERS || config->uses == 0)
		return -EINVAL;
	err = make_text(ticket.text);
	if (err != 0)
		return err;
	pthread_mutex_lock(&store->lock);
	lease = iswi_lease_find(store, id);
	err = lease == NULL ? -ENOENT : lease->open ? 0 : -EBUSY;
	if (err == 0) {
		/* First, so that nobody takes the place of a holder that ends. */
		forget(lease, number);
		err = end_holders(lease, number, config->wait_ms_max);
	}
	if (err == 0 && (!lease->open || holders(lease, number, false) > 0))
		err = -EBUSY; /* another call was faster */
	if (err == 0) {
		if (config->good_ms > 0)
			ticket.end_ns = store->clock->now_ns(store->clock->ctx) +
					config->good_ms * NS_PER_MS;
		lease->tickets[number] = ticket;
		lease->tickets_live |= 1ull << number;
		memcpy(ticket_out, ticket.text, ISW_TICKET_TEXT_BYTES);
	}
	pthread_mutex_unlock(&store->lock);
	return err;
}

int isw_store_ticket_end(isw_store *store, uint64_t id, uint32_t number)
{
	struct iswi_lease *lease;

	if (number >= ISW_TICKET_NUMBERS)
		return -EINVAL;
	pthread_mutex_lock(&store->lock);
	lease = iswi_lease_find(store, id);
	if (lease != NULL) {
		forget(lease, number);
		holders(lease, number, true);
	}
	pthread_mutex_unlock(&store->lock);
	return lease != NULL ? 0 : -ENOENT;
}
