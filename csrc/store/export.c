// SPDX-License-Identifier: Apache-2.0
/* A lease as an NBD export: who may connect, and which memory a request gets. */
#include <errno.h>
#include <stdlib.h>

#include "store/store.h"

static void describe(const struct iswi_lease *lease, struct iswi_nbd_export *export_out)
{
	const uint64_t slab_bytes = lease->store->config.slab_bytes;

	export_out->size_bytes =
		lease->page != NULL ? ISW_PAGE_BYTES : lease->slots_max * slab_bytes;
	export_out->block_bytes_min = 1;
	export_out->block_bytes_preferred = ISW_PAGE_BYTES;
	export_out->block_bytes_max = (uint32_t)ISWI_MIN(slab_bytes, ISWI_NBD_PAYLOAD_BYTES_MAX);
}

static void bind_conn(struct iswi_lease *lease, uint32_t ticket, struct iswi_store_conn *bound)
{
	iswi_ticket_use(lease, ticket);
	bound->lease = lease;
	bound->ticket = ticket;
	bound->number = ++lease->conn_last;
	bound->next = lease->conns;
	bound->link = &lease->conns;
	if (bound->next != NULL)
		bound->next->link = &bound->next;
	lease->conns = bound;
	lease->conn_count++;
}

static int export_open(void *ctx, const char *name, size_t name_bytes, struct iswi_nbd_conn *conn,
		       struct iswi_nbd_export *export_out)
{
	isw_store *store = ctx;
	struct iswi_store_conn *bound = NULL;
	struct iswi_lease *lease;
	uint32_t ticket = 0;
	int err = 0;

	if (conn != NULL) {
		bound = calloc(1, sizeof(*bound));
		if (bound == NULL)
			return -ENOMEM;
		bound->conn = conn;
	}
	/*
	 * Looked up, used and bound in one step: a lease that is being renewed either refuses the
	 * connection or finds it in the list of those to shut, and of several that show the same
	 * ticket one gets in.
	 */
	pthread_mutex_lock(&store->lock);
	lease = iswi_ticket_find(store, name, name_bytes, &ticket);
	if (lease == NULL) {
		err = -ENOENT;
	} else if (bound != NULL && lease->conn_count >= store->config.connections_per_lease_max) {
		err = -EMFILE;
	} else {
		describe(lease, export_out);
		if (bound != NULL) {
			bind_conn(lease, ticket, bound);
			export_out->handle = bound;
			export_out->counters = &lease->counters;
		}
	}
	pthread_mutex_unlock(&store->lock);
	if (err != 0)
		free(bound);
	return err;
}

static void export_close(void *ctx, struct iswi_nbd_export *export, struct iswi_nbd_conn *conn)
{
	isw_store *store = ctx;
	struct iswi_store_conn *bound = export->handle;

	(void)conn;
	pthread_mutex_lock(&store->lock);
	*bound->link = bound->next;
	if (bound->next != NULL)
		bound->next->link = bound->link;
	bound->lease->conn_count--;
	pthread_cond_broadcast(&store->changed);
	pthread_mutex_unlock(&store->lock);
	free(bound);
}

static void drop_ref(isw_store *store, struct iswi_slot *slot)
{
	if (atomic_fetch_sub(&slot->refs, 1) != 1)
		return;
	/*
	 * The last request. If the word says mapped, a later fence reads refs after this. If it
	 * does not, a call may be waiting, and the lock makes sure that it hears the broadcast.
	 */
	if ((atomic_load(&slot->word) & ISWI_SLOT_STATE_MASK) != ISWI_SLOT_FENCED)
		return;
	pthread_mutex_lock(&store->lock);
	pthread_cond_broadcast(&store->changed);
	pthread_mutex_unlock(&store->lock);
}

/*
 * A request that reaches over a slot's border is refused: two slots have two fences, and no
 * client of ours sends one (the engine splits at slab borders).
 */
static int export_hold(struct iswi_nbd_export *export, uint64_t offset, uint32_t length,
		       struct iswi_nbd_hold *hold_out)
{
	struct iswi_store_conn *bound = export->handle;
	struct iswi_lease *lease = bound->lease;
	const uint64_t slab_bytes = lease->store->config.slab_bytes;
	const uint64_t within = offset % slab_bytes;
	struct iswi_slot *slot = &lease->slots[offset / slab_bytes];

	if (length > slab_bytes - within)
		return -EINVAL;
	atomic_fetch_add(&slot->refs, 1);
	if ((atomic_load(&slot->word) & ISWI_SLOT_STATE_MASK) != ISWI_SLOT_MAPPED) {
		drop_ref(lease->store, slot);
		return -ENXIO;
	}
	hold_out->memory = slot->memory + within;
	hold_out->cookie = slot;
	return 0;
}

static void export_release(struct iswi_nbd_export *export, struct iswi_nbd_hold *hold)
{
	struct iswi_store_conn *bound = export->handle;

	drop_ref(bound->lease->store, hold->cookie);
}

const struct iswi_nbd_backend iswi_store_backend = {
	.listed = NULL,
	.open = export_open,
	.close = export_close,
	.hold = export_hold,
	.release = export_release,
};
