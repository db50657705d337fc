/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs registered ahead. To register a slab the kernel looks up each of its pages: for 1 GiB 46 ms
 * on an emulated machine, while somebody waits for the mapping. So a background thread does it when
 * nobody waits, for nobody, in a domain without queue pairs. A lease that gets the slab moves the
 * registration into its own domain, which looks up nothing: 0.6 ms (docs/adr/0028).
 */
#include <errno.h>
#include <string.h>

#include "store/rdma.h"

/* store->lock held. The slab has none, or mr is NULL. */
static void set_ahead(struct iswi_rdma_store *rdma, uint32_t number, struct iswi_vmr *mr)
{
	uint32_t *ready = &rdma->store->slabs[number].ready;

	rdma->slabs[number].ahead = mr;
	*ready &= ~(1u << ISW_TRANSPORT_RDMA);
	if (mr != NULL)
		*ready |= 1u << ISW_TRANSPORT_RDMA;
}

/* store->lock held. */
static bool is_at_hand(const struct iswi_rdma_slab *slab, const struct iswi_store_device *device)
{
	return slab->ahead != NULL && !slab->registering && slab->device == device &&
	       !atomic_load(&device->immovable);
}

int iswi_slab_ahead_take(struct iswi_rdma_store *rdma, uint32_t number,
			 const struct iswi_store_device *at_hand, struct iswi_vmr **mr_out,
			 struct iswi_store_device **device_out)
{
	struct iswi_rdma_slab *slab = &rdma->slabs[number];
	isw_store *store = rdma->store;
	int code = 0;

	pthread_mutex_lock(&store->lock);
	while (slab->registering && at_hand == NULL)
		pthread_cond_wait(&store->changed, &store->lock);
	if (at_hand != NULL && !is_at_hand(slab, at_hand)) {
		code = -EAGAIN;
	} else {
		*mr_out = slab->ahead;
		*device_out = slab->device;
		set_ahead(rdma, number, NULL);
		slab->lent = true;
	}
	pthread_mutex_unlock(&store->lock);
	return code;
}

void iswi_slab_ahead_leave(struct iswi_rdma_store *rdma, uint32_t number)
{
	pthread_mutex_lock(&rdma->store->lock);
	rdma->slabs[number].lent = false;
	pthread_mutex_unlock(&rdma->store->lock);
}

void iswi_slab_ahead_end(struct iswi_rdma_store *rdma, uint32_t number)
{
	struct iswi_vmr *mr;

	pthread_mutex_lock(&rdma->store->lock); /* against statistics */
	mr = rdma->slabs[number].ahead;
	set_ahead(rdma, number, NULL);
	pthread_mutex_unlock(&rdma->store->lock);
	if (mr == NULL)
		return;
	/* A removed device may refuse; then nobody can reach the registration. */
	rdma->verbs->mr_free(mr);
	iswi_store_device_put(rdma, rdma->slabs[number].device);
}

/* store->lock held. Until `done`, nobody else registers the slab, and its memory stays. */
static void begin(struct iswi_rdma_store *rdma, uint32_t number)
{
	rdma->slabs[number].registering = true;
	rdma->store->slabs[number].holds++;
}

/* store->lock held. */
static void done(struct iswi_rdma_store *rdma, uint32_t number)
{
	rdma->slabs[number].registering = false;
	rdma->store->slabs[number].holds--;
	pthread_cond_broadcast(&rdma->store->changed);
}

/*
 * store->lock held. slabs_size: none. Prefers a mapped slab: its lease does without RDMA, so its
 * registration is worth less than that of a free one.
 */
static uint32_t find_spare(const struct iswi_rdma_store *rdma, bool leaving_only)
{
	const isw_store *store = rdma->store;
	uint32_t found = store->slabs_size;

	for (uint32_t i = 0; i < store->slabs_size; i++) {
		const struct iswi_rdma_slab *one = &rdma->slabs[i];

		if (one->ahead == NULL || one->registering ||
		    store->slabs[i].state == ISWI_SLAB_FREEING)
			continue;
		if (leaving_only && !atomic_load(&one->device->leaving))
			continue;
		if (found == store->slabs_size || store->slabs[i].state == ISWI_SLAB_MAPPED)
			found = i;
	}
	return found;
}

bool iswi_store_ahead_end_one(struct iswi_rdma_store *rdma, bool leaving_only)
{
	isw_store *store = rdma->store;
	uint32_t slab;

	pthread_mutex_lock(&store->lock);
	slab = find_spare(rdma, leaving_only);
	if (slab < store->slabs_size)
		begin(rdma, slab);
	pthread_mutex_unlock(&store->lock);
	if (slab == store->slabs_size)
		return false;
	iswi_slab_ahead_end(rdma, slab);
	pthread_mutex_lock(&store->lock);
	done(rdma, slab);
	pthread_mutex_unlock(&store->lock);
	return true;
}

void isw_store_rdma_ahead_end(isw_store *store)
{
	while (iswi_store_ahead_end_one(iswi_rdma_of(store), false))
		;
}

/* ------------------------------------------------------------------ in the background */

/* The device that leases use; before one does, the first with an active port. */
static int choose_device(struct iswi_rdma_store *rdma, char *name_out, struct isw_error *error)
{
	struct isw_rdma_port ports[4];
	int count, code = 0;

	pthread_mutex_lock(&rdma->devices_lock);
	memcpy(name_out, rdma->ahead_name, sizeof(rdma->ahead_name));
	pthread_mutex_unlock(&rdma->devices_lock);
	if (name_out[0] != '\0')
		return 0;
	count = rdma->verbs->ports(ports, ISWI_ARRAY_LEN(ports), error);
	if (count < 0)
		return count;
	for (int i = 0; i < ISWI_MIN(count, (int)ISWI_ARRAY_LEN(ports)); i++)
		if (ports[i].active && name_out[0] == '\0')
			memcpy(name_out, ports[i].device, sizeof(rdma->ahead_name));
	if (name_out[0] == '\0')
		return iswi_error(error, -ENETDOWN, "no port of an RDMA device is up");
	pthread_mutex_lock(&rdma->devices_lock);
	if (rdma->ahead_name[0] == '\0') {
		memcpy(rdma->ahead_name, name_out, sizeof(rdma->ahead_name));
		rdma->ahead_guessed = true;
	}
	pthread_mutex_unlock(&rdma->devices_lock);
	return code;
}

/* store->lock held. */
static bool is_wanting(const struct iswi_rdma_store *rdma, uint32_t number, const char *name)
{
	const enum iswi_slab_state state = rdma->store->slabs[number].state;
	const struct iswi_rdma_slab *slab = &rdma->slabs[number];

	return (state == ISWI_SLAB_FREE || state == ISWI_SLAB_MAPPED) && !slab->lent &&
	       !slab->registering &&
	       (slab->ahead == NULL || !iswi_store_device_is(slab->device, name));
}

/* The next slab to register with a device of that name; mark: begins it. slabs_size: none. */
static uint32_t next_slab(struct iswi_rdma_store *rdma, const char *name, bool mark)
{
	isw_store *store = rdma->store;
	uint32_t found = 0;

	pthread_mutex_lock(&store->lock);
	while (found < store->slabs_size && !is_wanting(rdma, found, name))
		found++;
	if (found < store->slabs_size && mark)
		begin(rdma, found);
	pthread_mutex_unlock(&store->lock);
	return found;
}

int isw_store_rdma_ahead(isw_store *store, struct isw_error *error)
{
	struct iswi_rdma_store *rdma = iswi_rdma_of(store);
	char name[ISW_RDMA_NAME_BYTES];
	struct iswi_store_device *device;
	struct iswi_vmr *mr = NULL;
	struct iswi_verbs_key key;
	uint32_t slab;
	int code = choose_device(rdma, name, error);

	if (code == 0 && next_slab(rdma, name, false) == store->slabs_size)
		return -ENOENT; /* and nothing is opened */
	if (code == 0)
		code = iswi_store_device_get(rdma, name, &device, error);
	if (code != 0) {
		/* Another device may have that name by the next time. */
		pthread_mutex_lock(&rdma->devices_lock);
		rdma->ahead_name[0] = '\0';
		pthread_mutex_unlock(&rdma->devices_lock);
		return code;
	}
	/* A lease has no use for a registration that cannot be moved into its domain. */
	slab = atomic_load(&device->immovable) ? store->slabs_size : next_slab(rdma, name, true);
	if (slab == store->slabs_size) {
		iswi_store_device_put(rdma, device);
		return -ENOENT;
	}
	iswi_slab_ahead_end(rdma, slab); /* with a device that is no longer used */
	code = rdma->verbs->mr_make(device->spare, store->slabs[slab].mem.base,
				    store->config.slab_bytes, 0, &mr, &key);
	pthread_mutex_lock(&store->lock);
	done(rdma, slab);
	if (code == 0) {
		set_ahead(rdma, slab, mr);
		rdma->slabs[slab].device = device; /* which it uses from now on */
	}
	pthread_mutex_unlock(&store->lock);
	if (code == 0)
		return 0;
	atomic_fetch_add_explicit(&rdma->failures, 1, memory_order_relaxed);
	iswi_store_device_failed(device, code);
	iswi_store_device_put(rdma, device);
	return iswi_error(
		error, code, "a slab cannot be registered ahead with RDMA device %s: %s%s", name,
		strerror(-code), code == -ENOMEM ? " (ulimit -l, LimitMEMLOCK=infinity)" : "");
}
