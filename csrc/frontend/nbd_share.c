// SPDX-License-Identifier: Apache-2.0
/* Which connection gets the next request buffer: see the header. */
#include "frontend/nbd_share.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Fewer buffers per place would leave too few to a connection that is alone. */
#define BUFFERS_PER_PLACE 4u

/* share->lock held, as in every function up to init. */
static uint32_t share_of_each(const struct iswi_nbd_share *share)
{
	const uint32_t absent = share->places > share->joined ? share->places - share->joined : 0;

	return ISWI_MAX((share->count - absent) / share->joined, 1u);
}

/* How many connections hold nothing: those that are here, and those that may come. */
static uint32_t unserved(const struct iswi_nbd_share *share)
{
	return ISWI_MAX(share->places, share->joined) - share->served;
}

static bool may_take(const struct iswi_nbd_client *client)
{
	const struct iswi_nbd_share *share = client->share;

	if (share->free == NULL)
		return false;
	if (share->places == 0 || client->taken == 0)
		return true;
	return client->taken < share_of_each(share) && share->free_count > unserved(share);
}

static void wake(struct iswi_nbd_share *share)
{
	if (share->waiting == 0)
		return;
	for (uint32_t i = 0; i < share->clients_max; i++) {
		struct iswi_nbd_client *client = &share->clients[i];

		if (client->waiting && may_take(client))
			pthread_cond_signal(&client->changed);
	}
}

int iswi_nbd_share_init(struct iswi_nbd_share *share, uint32_t clients_max, uint32_t count,
			bool fair)
{
	uint32_t made = 0;
	int err;

	memset(share, 0, sizeof(*share));
	share->clients_max = clients_max;
	share->count = count;
	if (fair)
		share->places = ISWI_MAX(ISWI_MIN(clients_max, count / BUFFERS_PER_PLACE), 1u);
	share->clients = calloc(clients_max, sizeof(*share->clients));
	if (share->clients == NULL)
		return -ENOMEM;
	err = -pthread_mutex_init(&share->lock, NULL);
	if (err != 0)
		goto err_clients;
	for (; made < clients_max; made++) {
		share->clients[made].share = share;
		err = -pthread_cond_init(&share->clients[made].changed, NULL);
		if (err != 0)
			goto err_conds;
	}
	return 0;

err_conds:
	while (made > 0)
		pthread_cond_destroy(&share->clients[--made].changed);
	pthread_mutex_destroy(&share->lock);
err_clients:
	free(share->clients);
	return err;
}

void iswi_nbd_share_fini(struct iswi_nbd_share *share)
{
	for (uint32_t i = 0; i < share->clients_max; i++)
		pthread_cond_destroy(&share->clients[i].changed);
	pthread_mutex_destroy(&share->lock);
	free(share->clients);
}

void iswi_nbd_share_add(struct iswi_nbd_share *share, struct iswi_nbd_request *request)
{
	request->next = share->free;
	share->free = request;
	share->free_count++;
}

struct iswi_nbd_client *iswi_nbd_share_join(struct iswi_nbd_share *share)
{
	struct iswi_nbd_client *client = share->clients;

	pthread_mutex_lock(&share->lock);
	while (client->joined) /* the server has no more connections than there are clients */
		client++;
	client->joined = true;
	share->joined++;
	pthread_mutex_unlock(&share->lock);
	return client;
}

void iswi_nbd_share_leave(struct iswi_nbd_client *client)
{
	struct iswi_nbd_share *share = client->share;

	pthread_mutex_lock(&share->lock);
	client->joined = false;
	share->joined--;
	wake(share);
	pthread_mutex_unlock(&share->lock);
}

struct iswi_nbd_request *iswi_nbd_share_take(struct iswi_nbd_client *client)
{
	struct iswi_nbd_share *share = client->share;
	struct iswi_nbd_request *request;

	pthread_mutex_lock(&share->lock);
	if (!may_take(client)) {
		client->waiting = true;
		share->waiting++;
		while (!may_take(client))
			pthread_cond_wait(&client->changed, &share->lock);
		client->waiting = false;
		share->waiting--;
	}
	request = share->free;
	share->free = request->next;
	share->free_count--;
	if (client->taken++ == 0)
		share->served++;
	pthread_mutex_unlock(&share->lock);
	return request;
}

void iswi_nbd_share_give(struct iswi_nbd_client *client, struct iswi_nbd_request *request)
{
	struct iswi_nbd_share *share = client->share;

	pthread_mutex_lock(&share->lock);
	request->next = share->free;
	share->free = request;
	share->free_count++;
	if (--client->taken == 0)
		share->served--;
	wake(share);
	pthread_mutex_unlock(&share->lock);
}

bool iswi_nbd_share_exceeded(struct iswi_nbd_client *client)
{
	struct iswi_nbd_share *share = client->share;
	bool exceeded;

	pthread_mutex_lock(&share->lock);
	exceeded = share->places != 0 && client->taken > share_of_each(share);
	pthread_mutex_unlock(&share->lock);
	return exceeded;
}
