// SPDX-License-Identifier: Apache-2.0
/* Leases: made, fenced, renewed, destroyed; slabs put into their slots and taken out. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "store/store.h"

struct iswi_lease *iswi_lease_find(struct isw_store *store, uint64_t id)
{
	for (uint32_t i = 0; i < store->config.leases_max; i++) {
		struct iswi_lease *lease = store->leases[i];

		if (lease != NULL && lease->id == id && !lease->dying)
			return lease;
	}
	return NULL;
}

void iswi_lease_shut(struct iswi_lease *lease)
{
	for (struct iswi_store_conn *bound = lease->conns; bound != NULL; bound = bound->next)
		iswi_nbd_conn_shutdown(bound->conn);
}

void iswi_slot_empty(struct iswi_lease *lease, struct iswi_slot *slot)
{
	uint64_t word = atomic_load(&slot->word);

	iswi_slab_retire(lease->store, &lease->store->slabs[slot->slab]);
	slot->memory = NULL;
	atomic_store(&slot->word, (word & ~(uint64_t)ISWI_SLOT_STATE_MASK) | ISWI_SLOT_EMPTY);
	lease->slots_mapped--;
}

struct timespec iswi_store_deadline(uint32_t ms)
{
	struct timespec deadline;

	clock_gettime(CLOCK_MONOTONIC, &deadline);
	deadline.tv_sec += ms / 1000;
	deadline.tv_nsec += (long)(ms % 1000) * 1000000;
	if (deadline.tv_nsec >= 1000000000) {
		deadline.tv_sec++;
		deadline.tv_nsec -= 1000000000;
	}
	return deadline;
}

/* store->lock held: while a call is between these two, the lease is not freed. */
void iswi_lease_enter(struct iswi_lease *lease)
{
	lease->users++;
}

void iswi_lease_leave(struct iswi_lease *lease)
{
	lease->users--;
	pthread_cond_broadcast(&lease->store->changed);
}

static bool make_page(struct iswi_lease *lease)
{
	lease->page = aligned_alloc(ISW_PAGE_BYTES, ISW_PAGE_BYTES);
	if (lease->page == NULL)
		return false;
	memset(lease->page, 0, ISW_PAGE_BYTES); /* never another consumer's bytes */
	lease->slots[0].memory = lease->page;
	atomic_store(&lease->slots[0].word, ISWI_SLOT_MAPPED);
	return true;
}

struct iswi_lease *iswi_lease_alloc(isw_store *store, uint32_t slots_max)
{
	const uint32_t slots = ISWI_MAX(slots_max, 1u);
	struct iswi_lease *lease;
	size_t bytes = sizeof(*lease) + slots * sizeof(struct iswi_slot);

	lease = aligned_alloc(_Alignof(struct iswi_lease), bytes);
	if (lease == NULL)
		return NULL;
	memset(lease, 0, bytes);
	lease->store = store;
	lease->slots_max = slots_max;
	lease->epoch = 1;
	for (uint32_t i = 0; i < slots; i++) {
		atomic_init(&lease->slots[i].word, ISWI_SLOT_EMPTY);
		atomic_init(&lease->slots[i].refs, 0);
	}
	if (slots_max == 0 && !make_page(lease)) {
		free(lease);
		return NULL;
	}
	for (uint32_t i = 0; store->transports[i] != NULL; i++) {
		const struct iswi_store_transport *transport = store->transports[i];

		if (transport->lease_create(lease, &lease->parts[transport->kind]) != 0) {
			iswi_lease_free(lease);
			return NULL;
		}
	}
	return lease;
}

void iswi_lease_free(struct iswi_lease *lease)
{
	const struct iswi_store_transport *const *transports = lease->store->transports;

	for (uint32_t i = 0; transports[i] != NULL; i++)
		if (lease->parts[transports[i]->kind] != NULL)
			transports[i]->lease_destroy(lease);
	free(lease->page);
	free(lease);
}

int iswi_lease_end(struct iswi_lease *lease, bool pause)
{
	const struct iswi_store_transport *const *transports = lease->store->transports;
	int err = 0;

	for (uint32_t i = 0; transports[i] != NULL && err == 0; i++)
		err = transports[i]->lease_end(lease, pause);
	return err;
}

static int slot_end(struct iswi_lease *lease, uint32_t slot, bool forced)
{
	const struct iswi_store_transport *const *transports = lease->store->transports;
	int err = 0;

	for (uint32_t i = 0; transports[i] != NULL && err == 0; i++)
		err = transports[i]->slot_end(lease, slot, forced);
	return err;
}

bool iswi_lease_insert(isw_store *store, struct iswi_lease *lease)
{
	for (uint32_t i = 0; i < store->config.leases_max; i++) {
		if (store->leases[i] != NULL)
			continue;
		store->leases[i] = lease;
		return true;
	}
	return false;
}

static void lease_remove(struct iswi_lease *lease)
{
	isw_store *store = lease->store;

	for (uint32_t i = 0; i < store->config.leases_max; i++)
		if (store->leases[i] == lease)
			store->leases[i] = NULL;
}

int isw_store_lease_create(isw_store *store, uint32_t slots_max, uint64_t *lease_out,
			   struct isw_error *error)
{
	struct iswi_lease *lease;
	int err;

	if (slots_max > ISWI_STORE_SLOTS_MAX)
		return iswi_error(error, -EINVAL, "a lease of %u slots: up to %u are possible",
				  slots_max, ISWI_STORE_SLOTS_MAX);
	lease = iswi_lease_alloc(store, slots_max);
	if (lease == NULL)
		return iswi_error(error, -ENOMEM, "no memory for a lease of %u slots", slots_max);
	pthread_mutex_lock(&store->lock);
	err = iswi_store_number(store, &store->lease_last, &lease->id);
	if (err == 0 && !iswi_lease_insert(store, lease))
		err = -ENOSPC;
	lease->open = err == 0;
	*lease_out = lease->id;
	pthread_mutex_unlock(&store->lock);
	if (err == 0)
		return 0;
	iswi_lease_free(lease);
	if (err != -ENOSPC)
		return iswi_error(error, err, "no number for a lease: %s", strerror(-err));
	return iswi_error(error, err, "this donor has all the %u leases it may have",
			  store->config.leases_max);
}

/* store->lock held, and dropped while waiting. -ENOENT: the lease is being destroyed. */
static int wait_unconnected(struct iswi_lease *lease, const struct timespec *deadline)
{
	isw_store *store = lease->store;
	int err = 0;

	while (lease->conn_count > 0 && !lease->dying && err == 0)
		err = -pthread_cond_timedwait(&store->changed, &store->lock, deadline);
	if (lease->dying)
		return -ENOENT;
	return lease->conn_count == 0 ? 0 : err;
}

int isw_store_lease_renew(isw_store *store, uint64_t id, uint32_t wait_ms_max)
{
	struct timespec deadline = iswi_store_deadline(wait_ms_max);
	struct iswi_lease *lease;
	int err;

	pthread_mutex_lock(&store->lock);
	lease = iswi_lease_find(store, id);
	if (lease == NULL || lease->renewing) {
		err = lease == NULL ? -ENOENT : -EBUSY;
		goto out_unlock;
	}
	iswi_lease_enter(lease);
	lease->renewing = true;
	lease->epoch++;
	/* No new connection is let in, and the present ones are shut down. */
	lease->open = false;
	memset(lease->tickets, 0, sizeof(lease->tickets));
	lease->tickets_live = 0;
	iswi_lease_shut(lease);
	pthread_mutex_unlock(&store->lock);
	err = iswi_lease_end(lease, true);
	pthread_mutex_lock(&store->lock);
	if (err == 0)
		err = wait_unconnected(lease, &deadline);
	if (err == 0)
		lease->open = true;
	lease->renewing = false;
	iswi_lease_leave(lease);
out_unlock:
	pthread_mutex_unlock(&store->lock);
	return err;
}

/*
 * The rest of a dying lease, which nobody else can enter. It has no connection and therefore no
 * request, so no slot needs a fence. If a transport cannot end what it has of the lease, the slabs
 * stay out of the pool.
 */
static int destroy_rest(struct iswi_lease *lease)
{
	isw_store *store = lease->store;
	int err = iswi_lease_end(lease, false);

	pthread_mutex_lock(&store->lock);
	for (uint32_t i = 0; i < lease->slots_max && err == 0; i++)
		if ((atomic_load(&lease->slots[i].word) & ISWI_SLOT_STATE_MASK) != ISWI_SLOT_EMPTY)
			iswi_slot_empty(lease, &lease->slots[i]);
	if (err == 0)
		lease_remove(lease);
	lease->stuck = err != 0;
	pthread_mutex_unlock(&store->lock);
	if (err == 0)
		iswi_lease_free(lease);
	return err;
}

int isw_store_lease_destroy(isw_store *store, uint64_t id)
{
	struct iswi_lease *lease;

	pthread_mutex_lock(&store->lock);
	lease = iswi_lease_find(store, id);
	if (lease == NULL) {
		pthread_mutex_unlock(&store->lock);
		return -ENOENT;
	}
	lease->dying = true;
	lease->open = false;
	iswi_lease_shut(lease);
	pthread_cond_broadcast(&store->changed); /* a renewal gives up */
	while (lease->conn_count > 0 || lease->users > 0)
		pthread_cond_wait(&store->changed, &store->lock);
	pthread_mutex_unlock(&store->lock);
	return destroy_rest(lease);
}

void iswi_lease_destroy_again(isw_store *store, uint32_t number)
{
	struct iswi_lease *lease;

	pthread_mutex_lock(&store->lock);
	lease = store->leases[number];
	if (lease != NULL && lease->stuck)
		lease->stuck = false; /* ours */
	else
		lease = NULL;
	pthread_mutex_unlock(&store->lock);
	if (lease != NULL)
		destroy_rest(lease);
}

int isw_store_lease_stats(isw_store *store, uint64_t id, struct isw_lease_stats *stats_out)
{
	struct iswi_lease *lease;
	int err = 0;

	pthread_mutex_lock(&store->lock);
	lease = iswi_lease_find(store, id);
	if (lease == NULL) {
		err = -ENOENT;
	} else {
		stats_out->epoch = lease->epoch;
		stats_out->slots_max = lease->slots_max;
		stats_out->slots_mapped = lease->slots_mapped;
		stats_out->connections = lease->conn_count;
		stats_out->read_bytes = iswi_counted(&lease->counters.read_bytes);
		stats_out->write_bytes = iswi_counted(&lease->counters.write_bytes);
		for (uint32_t i = 0; store->transports[i] != NULL; i++)
			store->transports[i]->lease_stats(lease, stats_out);
	}
	pthread_mutex_unlock(&store->lock);
	return err;
}

/*
 * store->lock held. slabs_size: there is none. Prefers a slab that the lease's own transports, and
 * no others, reach at once.
 */
static uint32_t find_free_slab(const struct iswi_lease *lease)
{
	const isw_store *store = lease->store;
	uint32_t found = store->slabs_size, wanted = 0;

	for (uint32_t i = 0; i < ISW_TRANSPORTS; i++)
		if (atomic_load_explicit(&lease->connections[i], memory_order_relaxed) > 0)
			wanted |= 1u << i;
	for (uint32_t i = 0; i < store->slabs_size; i++) {
		if (store->slabs[i].state != ISWI_SLAB_FREE)
			continue;
		if (store->slabs[i].ready == wanted)
			return i;
		if (found == store->slabs_size)
			found = i;
	}
	return found;
}

/* slots_max: no slot is empty. *barred_out: one would be, but for old connections. */
static uint32_t find_empty_slot(const struct iswi_lease *lease, bool *barred_out)
{
	uint64_t oldest = lease->conn_last + 1;

	for (const struct iswi_store_conn *bound = lease->conns; bound != NULL; bound = bound->next)
		oldest = ISWI_MIN(oldest, bound->number);
	*barred_out = false;
	for (uint32_t i = 0; i < lease->slots_max; i++) {
		uint32_t number = (lease->slot_next + i) % lease->slots_max;
		const struct iswi_slot *slot = &lease->slots[number];

		if ((atomic_load(&slot->word) & ISWI_SLOT_STATE_MASK) != ISWI_SLOT_EMPTY)
			continue;
		if (slot->barred < oldest)
			return number;
		*barred_out = true;
	}
	return lease->slots_max;
}

/* store->lock held. Writes the lease into the name of the slab's file. */
static int commit_mapped(isw_store *store, uint32_t slab, struct iswi_slab_name *to)
{
	int err = iswi_store_number(store, &store->generation_last, &to->generation);

	to->serial = store->slabs[slab].name.serial;
	to->kind = ISWI_SLAB_FILE_MAPPED;
	return err != 0 ? err : iswi_slab_dir_rename(&store->dir, &store->slabs[slab].name, to);
}

int isw_store_map(isw_store *store, uint64_t id, uint32_t tag, uint32_t *slot_out,
		  uint64_t *generation_out)
{
	struct iswi_slab_name name = {.lease = id, .tag = tag};
	struct iswi_lease *lease;
	struct iswi_slot *slot;
	uint32_t slab;
	int err = -ENOENT;
	bool barred;

	pthread_mutex_lock(&store->lock);
	lease = iswi_lease_find(store, id);
	if (lease == NULL)
		goto out_unlock;
	slab = find_free_slab(lease);
	if (slab == store->slabs_size)
		goto out_unlock;
	name.slot = find_empty_slot(lease, &barred);
	if (name.slot == lease->slots_max) {
		err = barred ? -EAGAIN : -ENOSPC;
		if (barred)
			iswi_lease_shut(lease); /* the device will open new ones */
		goto out_unlock;
	}
	err = commit_mapped(store, slab, &name);
	if (err != 0)
		goto out_unlock;
	slot = &lease->slots[name.slot];
	store->slabs[slab].state = ISWI_SLAB_MAPPED;
	slot->slab = slab;
	slot->tag = tag;
	slot->memory = store->slabs[slab].mem.base;
	*slot_out = name.slot;
	*generation_out = name.generation;
	/* Last, so that whoever sees the slot mapped sees its memory. Pair: the load in
	 * export_hold. */
	atomic_store(&slot->word,
		     (name.generation << ISWI_SLOT_STATE_BITS) | (uint64_t)ISWI_SLOT_MAPPED);
	lease->slots_mapped++;
	lease->slot_next = (name.slot + 1) % lease->slots_max;
out_unlock:
	pthread_mutex_unlock(&store->lock);
	return err;
}

/* store->lock held. Fences the slot, or returns why it cannot. */
static int fence(struct iswi_lease *lease, uint32_t number, uint64_t generation)
{
	struct iswi_slot *slot;
	uint64_t word;

	if (number >= lease->slots_max)
		return -EINVAL;
	slot = &lease->slots[number];
	word = atomic_load(&slot->word);
	if (word >> ISWI_SLOT_STATE_BITS != generation ||
	    (word & ISWI_SLOT_STATE_MASK) == ISWI_SLOT_EMPTY)
		return -ESTALE;
	if ((word & ISWI_SLOT_STATE_MASK) == ISWI_SLOT_FENCED)
		return -EALREADY;
	atomic_store(&slot->word,
		     (generation << ISWI_SLOT_STATE_BITS) | (uint64_t)ISWI_SLOT_FENCED);
	return 0;
}

int isw_store_unmap(isw_store *store, uint64_t id, uint32_t number, uint64_t generation,
		    uint32_t wait_ms_max)
{
	struct timespec deadline = iswi_store_deadline(wait_ms_max);
	struct iswi_lease *lease;
	struct iswi_slot *slot;
	int waited = 0, err;
	bool held;

	pthread_mutex_lock(&store->lock);
	lease = iswi_lease_find(store, id);
	err = lease == NULL ? -ENOENT : fence(lease, number, generation);
	if (err != 0)
		goto out_unlock;
	slot = &lease->slots[number];
	iswi_lease_enter(lease);
	pthread_mutex_unlock(&store->lock);
	err = slot_end(lease, number, wait_ms_max == 0);
	pthread_mutex_lock(&store->lock);
	if (err != 0) { /* the slot stays fenced, and its slab is lent to nobody else */
		iswi_lease_leave(lease);
		goto out_unlock;
	}
	/*
	 * It is enough that refs was zero once: requests that find the fence may raise it again
	 * for a moment.
	 */
	while ((held = atomic_load(&slot->refs) > 0) && waited == 0)
		waited = pthread_cond_timedwait(&store->changed, &store->lock, &deadline);
	if (held) {
		/* The time is over. Shutting a connection down ends its requests, too. */
		iswi_lease_shut(lease);
		while (atomic_load(&slot->refs) > 0)
			pthread_cond_wait(&store->changed, &store->lock);
	}
	if (held || wait_ms_max == 0)
		slot->barred = lease->conn_last;
	iswi_slot_empty(lease, slot);
	iswi_lease_leave(lease);
out_unlock:
	pthread_mutex_unlock(&store->lock);
	return err;
}
