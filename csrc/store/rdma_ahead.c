/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs that are registered ahead. To register a slab the kernel looks up each of its pages, which
 * takes too long for somebody who waits. So it is done when nobody does: in a domain without queue
 * pairs, for nobody. A lease that gets the slab moves the registration into its own domain, which
 * looks up nothing.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "store/store.h"

/* ------------------------------------------------------------------------- devices */

/* devices_lock held. */
static int open_device(isw_store *store, const char *name, struct iswi_store_device *device,
		       struct isw_error *error)
{
	int code = store->verbs->open(name, &device->dev, error);

	if (code != 0)
		return code;
	code = store->verbs->pd_make(device->dev, &device->spare);
	if (code != 0) {
		store->verbs->close(device->dev);
		return iswi_error(error, code, "RDMA device %s gives no protection domain: %s",
				  name, strerror(-code));
	}
	memcpy(device->name, name, sizeof(device->name));
	atomic_store(&device->stale, false);
	atomic_store(&device->immovable, false);
	atomic_store(&device->leaving, false);
	return 0;
}

int iswi_store_device_get(isw_store *store, const char *name, struct iswi_store_device **device_out,
			  struct isw_error *error)
{
	struct iswi_store_device *found = NULL, *room = NULL;
	int code = 0;

	pthread_mutex_lock(&store->devices_lock);
	for (uint32_t i = 0; i < ISWI_STORE_DEVICES_MAX && found == NULL; i++) {
		struct iswi_store_device *one = &store->devices[i];

		if (one->users == 0)
			room = one;
		else if (!atomic_load(&one->stale) && strcmp(one->name, name) == 0)
			found = one;
	}
	if (found == NULL && room == NULL)
		code = iswi_error(error, -ENOSPC, "the donor uses %u RDMA devices already",
				  ISWI_STORE_DEVICES_MAX);
	else if (found == NULL)
		code = open_device(store, name, found = room, error);
	if (code == 0) {
		found->users++;
		*device_out = found;
	}
	pthread_mutex_unlock(&store->devices_lock);
	return code;
}

void iswi_store_device_put(isw_store *store, struct iswi_store_device *device)
{
	pthread_mutex_lock(&store->devices_lock);
	if (--device->users == 0) {
		store->verbs->pd_free(device->spare);
		store->verbs->close(device->dev);
	}
	pthread_mutex_unlock(&store->devices_lock);
}

void iswi_store_device_failed(struct iswi_store_device *device, int code)
{
	if (!iswi_store_is_limit(code))
		atomic_store(&device->stale, true);
}

bool iswi_store_is_limit(int code)
{
	return code == -ENOMEM || code == -EAGAIN || code == -ENOSPC;
}

void iswi_store_device_chosen(isw_store *store, const struct iswi_store_device *device)
{
	pthread_mutex_lock(&store->devices_lock);
	if (!atomic_load(&device->stale) &&
	    (store->ahead_name[0] == '\0' || store->ahead_guessed)) {
		memcpy(store->ahead_name, device->name, sizeof(store->ahead_name));
		store->ahead_guessed = false;
	}
	pthread_mutex_unlock(&store->devices_lock);
}

bool iswi_store_device_is(const struct iswi_store_device *device, const char *name)
{
	return !atomic_load(&device->stale) && strcmp(device->name, name) == 0;
}

/* --------------------------------------------------------------------- one slab's */

/* store->lock held. */
static bool is_at_hand(const struct iswi_store_slab *slab, const struct iswi_store_device *device)
{
	return slab->ahead != NULL && !slab->registering && slab->ahead_device == device &&
	       !atomic_load(&device->immovable);
}

int iswi_slab_ahead_take(isw_store *store, uint32_t number, const struct iswi_store_device *at_hand,
			 struct iswi_vmr **mr_out, struct iswi_store_device **device_out)
{
	struct iswi_store_slab *slab = &store->slabs[number];
	int code = 0;

	pthread_mutex_lock(&store->lock);
	while (slab->registering && at_hand == NULL)
		pthread_cond_wait(&store->changed, &store->lock);
	if (at_hand != NULL && !is_at_hand(slab, at_hand)) {
		code = -EAGAIN;
	} else {
		*mr_out = slab->ahead;
		*device_out = slab->ahead_device;
		slab->ahead = NULL;
		slab->lent = true;
	}
	pthread_mutex_unlock(&store->lock);
	return code;
}

void iswi_slab_ahead_leave(isw_store *store, uint32_t number)
{
	pthread_mutex_lock(&store->lock);
	store->slabs[number].lent = false;
	pthread_mutex_unlock(&store->lock);
}

void iswi_slab_ahead_end(isw_store *store, struct iswi_store_slab *slab)
{
	struct iswi_vmr *mr;

	pthread_mutex_lock(&store->lock); /* against statistics */
	mr = slab->ahead;
	slab->ahead = NULL;
	pthread_mutex_unlock(&store->lock);
	if (mr == NULL)
		return;
	/* Where a device (that was removed) does not let it go, nobody could reach it. */
	store->verbs->mr_free(mr);
	iswi_store_device_put(store, slab->ahead_device);
}

/* One that nobody has mapped is worth more: it comes to be mapped over RDMA. NULL: none. */
static struct iswi_store_slab *find_spare(isw_store *store, bool leaving_only)
{
	struct iswi_store_slab *found = NULL;

	for (uint32_t i = 0; i < store->slabs_size; i++) {
		struct iswi_store_slab *one = &store->slabs[i];

		if (one->ahead == NULL || one->registering || one->state == ISWI_SLAB_FREEING)
			continue;
		if (leaving_only && !atomic_load(&one->ahead_device->leaving))
			continue;
		if (found == NULL || one->state == ISWI_SLAB_MAPPED)
			found = one;
	}
	return found;
}

static bool end_one(isw_store *store, bool leaving_only)
{
	struct iswi_store_slab *slab;

	pthread_mutex_lock(&store->lock);
	slab = find_spare(store, leaving_only);
	if (slab != NULL)
		slab->registering = true; /* nobody else touches it, and its memory stays */
	pthread_mutex_unlock(&store->lock);
	if (slab == NULL)
		return false;
	iswi_slab_ahead_end(store, slab);
	pthread_mutex_lock(&store->lock);
	slab->registering = false;
	pthread_cond_broadcast(&store->changed);
	pthread_mutex_unlock(&store->lock);
	return true;
}

bool iswi_store_ahead_spare(isw_store *store)
{
	return end_one(store, false);
}

void isw_store_rdma_ahead_end(isw_store *store)
{
	while (end_one(store, false))
		;
}

/* -------------------------------------------------------------- devices that are removed */

/* How many are since just now; any_out: whether there is one from which somebody must go. */
static uint32_t find_leaving(isw_store *store, bool *any_out)
{
	uint32_t count = 0;

	*any_out = false;
	pthread_mutex_lock(&store->devices_lock);
	for (uint32_t i = 0; i < ISWI_STORE_DEVICES_MAX; i++) {
		struct iswi_store_device *device = &store->devices[i];

		if (device->users == 0)
			continue;
		if (!atomic_load(&device->leaving) && store->verbs->is_leaving(device->dev)) {
			atomic_store(&device->leaving, true);
			atomic_store(&device->stale, true);
			if (strcmp(store->ahead_name, device->name) == 0)
				store->ahead_name[0] = '\0';
			count++;
		}
		*any_out |= atomic_load(&device->stale);
	}
	pthread_mutex_unlock(&store->devices_lock);
	return count;
}

/* NULL: no lease is there, or whoever destroys it ends that, too. */
static struct iswi_lease *enter(isw_store *store, uint32_t number)
{
	struct iswi_lease *lease;

	pthread_mutex_lock(&store->lock);
	lease = store->leases[number];
	if (lease != NULL && lease->dying)
		lease = NULL;
	if (lease != NULL)
		iswi_lease_enter(lease);
	pthread_mutex_unlock(&store->lock);
	return lease;
}

static void leave(struct iswi_lease *lease)
{
	isw_store *store = lease->store;

	pthread_mutex_lock(&store->lock);
	iswi_lease_leave(lease);
	pthread_mutex_unlock(&store->lock);
}

static bool has_stuck(isw_store *store)
{
	bool found = false;

	pthread_mutex_lock(&store->lock);
	for (uint32_t i = 0; i < store->config.leases_max && !found; i++)
		found = store->leases[i] != NULL && store->leases[i]->stuck;
	pthread_mutex_unlock(&store->lock);
	return found;
}

uint32_t isw_store_rdma_let_go(isw_store *store)
{
	uint32_t count;
	bool any;

	count = find_leaving(store, &any);
	if (!any && !has_stuck(store))
		return count;
	/* Consumers first: they wait. */
	for (uint32_t rest = 0; rest < 2; rest++) {
		for (uint32_t i = 0; i < store->config.leases_max; i++) {
			struct iswi_lease *lease = enter(store, i);

			if (lease == NULL) {
				iswi_lease_destroy_again(store, i);
				continue;
			}
			iswi_lease_rdma_let_go(lease, rest != 0);
			leave(lease);
		}
	}
	while (end_one(store, true))
		;
	return count;
}

/* ------------------------------------------------------------------ in the background */

/* Where leases have their connections; before there are any, the first device that has a port. */
static int choose_device(isw_store *store, char *name_out, struct isw_error *error)
{
	struct isw_rdma_port ports[4];
	int count, code = 0;

	pthread_mutex_lock(&store->devices_lock);
	memcpy(name_out, store->ahead_name, sizeof(store->ahead_name));
	pthread_mutex_unlock(&store->devices_lock);
	if (name_out[0] != '\0')
		return 0;
	count = store->verbs->ports(ports, ISWI_ARRAY_LEN(ports), error);
	if (count < 0)
		return count;
	for (int i = 0; i < ISWI_MIN(count, (int)ISWI_ARRAY_LEN(ports)); i++)
		if (ports[i].active && name_out[0] == '\0')
			memcpy(name_out, ports[i].device, sizeof(store->ahead_name));
	if (name_out[0] == '\0')
		return iswi_error(error, -ENETDOWN, "no port of an RDMA device is up");
	pthread_mutex_lock(&store->devices_lock);
	if (store->ahead_name[0] == '\0') {
		memcpy(store->ahead_name, name_out, sizeof(store->ahead_name));
		store->ahead_guessed = true;
	}
	pthread_mutex_unlock(&store->devices_lock);
	return code;
}

static bool is_wanting(const struct iswi_store_slab *slab, const char *name)
{
	return (slab->state == ISWI_SLAB_FREE || slab->state == ISWI_SLAB_MAPPED) && !slab->lent &&
	       !slab->registering &&
	       (slab->ahead == NULL || !iswi_store_device_is(slab->ahead_device, name));
}

/* The next slab to register with a device of that name; mark: nobody else does. NULL: none. */
static struct iswi_store_slab *next_slab(isw_store *store, const char *name, bool mark)
{
	struct iswi_store_slab *found = NULL;

	pthread_mutex_lock(&store->lock);
	for (uint32_t i = 0; i < store->slabs_size && found == NULL; i++)
		if (is_wanting(&store->slabs[i], name))
			found = &store->slabs[i];
	if (found != NULL && mark)
		found->registering = true;
	pthread_mutex_unlock(&store->lock);
	return found;
}

int isw_store_rdma_ahead(isw_store *store, struct isw_error *error)
{
	char name[ISW_RDMA_NAME_BYTES];
	struct iswi_store_device *device;
	struct iswi_store_slab *slab;
	struct iswi_vmr *mr = NULL;
	struct iswi_verbs_key key;
	int code = choose_device(store, name, error);

	if (code == 0 && next_slab(store, name, false) == NULL)
		return -ENOENT; /* and nothing is opened */
	if (code == 0)
		code = iswi_store_device_get(store, name, &device, error);
	if (code != 0) {
		/* It may have gone, or be another's name by the next time. */
		pthread_mutex_lock(&store->devices_lock);
		store->ahead_name[0] = '\0';
		pthread_mutex_unlock(&store->devices_lock);
		return code;
	}
	/* What cannot be moved into a lease's domain is of no use to it. */
	slab = atomic_load(&device->immovable) ? NULL : next_slab(store, name, true);
	if (slab == NULL) {
		iswi_store_device_put(store, device);
		return -ENOENT;
	}
	iswi_slab_ahead_end(store, slab); /* with a device that is not used any more */
	code = store->verbs->mr_make(device->spare, slab->mem.base, store->config.slab_bytes, 0,
				     &mr, &key);
	pthread_mutex_lock(&store->lock);
	slab->registering = false;
	if (code == 0) {
		slab->ahead = mr;
		slab->ahead_device = device; /* which is its user now */
	}
	pthread_cond_broadcast(&store->changed);
	pthread_mutex_unlock(&store->lock);
	if (code == 0)
		return 0;
	atomic_fetch_add_explicit(&store->rdma_failures, 1, memory_order_relaxed);
	iswi_store_device_failed(device, code);
	iswi_store_device_put(store, device);
	return iswi_error(
		error, code, "a slab cannot be registered ahead with RDMA device %s: %s%s", name,
		strerror(-code), code == -ENOMEM ? " (ulimit -l, LimitMEMLOCK=infinity)" : "");
}
