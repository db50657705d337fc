/* SPDX-License-Identifier: Apache-2.0 */
/* The donor's RDMA devices: opened for the first user, closed with the last, let go of in time. */
#include <errno.h>
#include <string.h>

#include "store/rdma.h"

/* devices_lock held. */
static int open_device(struct iswi_rdma_store *rdma, const char *name,
		       struct iswi_store_device *device, struct isw_error *error)
{
	int code = rdma->verbs->open(name, &device->dev, error);

	if (code != 0)
		return code;
	code = rdma->verbs->pd_make(device->dev, &device->spare);
	if (code != 0) {
		rdma->verbs->close(device->dev);
		return iswi_error(error, code, "RDMA device %s gives no protection domain: %s",
				  name, strerror(-code));
	}
	memcpy(device->name, name, sizeof(device->name));
	atomic_store(&device->stale, false);
	atomic_store(&device->immovable, false);
	atomic_store(&device->leaving, false);
	return 0;
}

int iswi_store_device_get(struct iswi_rdma_store *rdma, const char *name,
			  struct iswi_store_device **device_out, struct isw_error *error)
{
	struct iswi_store_device *found = NULL, *room = NULL;
	int code = 0;

	pthread_mutex_lock(&rdma->devices_lock);
	for (uint32_t i = 0; i < ISWI_STORE_DEVICES_MAX && found == NULL; i++) {
		struct iswi_store_device *one = &rdma->devices[i];

		if (one->users == 0)
			room = one;
		else if (!atomic_load(&one->stale) && strcmp(one->name, name) == 0)
			found = one;
	}
	if (found == NULL && room == NULL)
		code = iswi_error(error, -ENOSPC, "the donor uses %u RDMA devices already",
				  ISWI_STORE_DEVICES_MAX);
	else if (found == NULL)
		code = open_device(rdma, name, found = room, error);
	if (code == 0) {
		found->users++;
		*device_out = found;
	}
	pthread_mutex_unlock(&rdma->devices_lock);
	return code;
}

void iswi_store_device_put(struct iswi_rdma_store *rdma, struct iswi_store_device *device)
{
	pthread_mutex_lock(&rdma->devices_lock);
	if (--device->users == 0) {
		rdma->verbs->pd_free(device->spare);
		rdma->verbs->close(device->dev);
	}
	pthread_mutex_unlock(&rdma->devices_lock);
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

void iswi_store_device_chosen(struct iswi_rdma_store *rdma, const struct iswi_store_device *device)
{
	pthread_mutex_lock(&rdma->devices_lock);
	if (!atomic_load(&device->stale) && (rdma->ahead_name[0] == '\0' || rdma->ahead_guessed)) {
		memcpy(rdma->ahead_name, device->name, sizeof(rdma->ahead_name));
		rdma->ahead_guessed = false;
	}
	pthread_mutex_unlock(&rdma->devices_lock);
}

bool iswi_store_device_is(const struct iswi_store_device *device, const char *name)
{
	return !atomic_load(&device->stale) && strcmp(device->name, name) == 0;
}

uint32_t iswi_store_devices_look(struct iswi_rdma_store *rdma, bool *any_out)
{
	uint32_t count = 0;

	*any_out = false;
	pthread_mutex_lock(&rdma->devices_lock);
	for (uint32_t i = 0; i < ISWI_STORE_DEVICES_MAX; i++) {
		struct iswi_store_device *device = &rdma->devices[i];

		if (device->users == 0)
			continue;
		if (!atomic_load(&device->leaving) && rdma->verbs->is_leaving(device->dev)) {
			atomic_store(&device->leaving, true);
			atomic_store(&device->stale, true);
			if (strcmp(rdma->ahead_name, device->name) == 0)
				rdma->ahead_name[0] = '\0';
			count++;
		}
		*any_out |= atomic_load(&device->stale);
	}
	pthread_mutex_unlock(&rdma->devices_lock);
	return count;
}
