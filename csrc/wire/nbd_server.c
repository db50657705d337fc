// SPDX-License-Identifier: Apache-2.0
/* The server as a whole: made, asked for its counters, destroyed. */
#define _GNU_SOURCE 1
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "wire/nbd_conn.h"

static int init_left(struct iswi_nbd_server *server)
{
	pthread_condattr_t attr;
	int err = -pthread_condattr_init(&attr);

	if (err != 0)
		return err;
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	err = -pthread_cond_init(&server->left, &attr);
	pthread_condattr_destroy(&attr);
	return err;
}

int iswi_nbd_server_create(const struct iswi_nbd_server_config *config,
			   struct iswi_nbd_server **server_out, struct isw_error *error)
{
	struct iswi_nbd_server *server;
	int err = -ENOMEM;

	if (config->connections_max == 0 || config->handshake_ms_max == 0 ||
	    config->send_ms_max == 0 || config->send_ms_max > INT32_MAX)
		return iswi_error(error, -EINVAL,
				  "the server's limits on connections and times must not be 0");
	server = calloc(1, sizeof(*server));
	if (server == NULL)
		goto err_out;
	server->config = *config;
	server->conns = calloc(config->connections_max, sizeof(struct iswi_nbd_conn *));
	if (server->conns == NULL)
		goto err_server;
	server->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (server->stop_fd < 0) {
		err = -errno;
		goto err_conns;
	}
	err = -pthread_mutex_init(&server->lock, NULL);
	if (err != 0)
		goto err_stop_fd;
	err = -pthread_mutex_init(&server->fence_lock, NULL);
	if (err != 0)
		goto err_lock;
	err = -pthread_mutex_init(&server->hand_lock, NULL);
	if (err != 0)
		goto err_fence_lock;
	err = init_left(server);
	if (err != 0)
		goto err_hand_lock;
	server->workers_stop_fd = -1;
	*server_out = server;
	return 0;

err_hand_lock:
	pthread_mutex_destroy(&server->hand_lock);
err_fence_lock:
	pthread_mutex_destroy(&server->fence_lock);
err_lock:
	pthread_mutex_destroy(&server->lock);
err_stop_fd:
	close(server->stop_fd);
err_conns:
	free(server->conns);
err_server:
	free(server);
err_out:
	return iswi_error(error, err, "the NBD server could not be set up: %s", strerror(-err));
}

void iswi_nbd_server_destroy(struct iswi_nbd_server *server)
{
	if (server == NULL)
		return;
	iswi_nbd_server_unlisten(server); /* from here on nothing is added to conns */
	iswi_nbd_conns_end(server);
	pthread_cond_destroy(&server->left);
	pthread_mutex_destroy(&server->hand_lock);
	pthread_mutex_destroy(&server->fence_lock);
	pthread_mutex_destroy(&server->lock);
	close(server->stop_fd);
	free(server->conns);
	free(server);
}

void iswi_nbd_server_stats(struct iswi_nbd_server *server, struct iswi_nbd_server_stats *stats_out)
{
	pthread_mutex_lock(&server->lock);
	stats_out->connections = server->conn_count;
	pthread_mutex_unlock(&server->lock);
	stats_out->connections_refused = iswi_counted(&server->connections_refused);
	stats_out->read_requests = iswi_counted(&server->counters.read_requests);
	stats_out->write_requests = iswi_counted(&server->counters.write_requests);
	stats_out->read_bytes = iswi_counted(&server->counters.read_bytes);
	stats_out->write_bytes = iswi_counted(&server->counters.write_bytes);
	stats_out->request_errors = iswi_counted(&server->request_errors);
	stats_out->protocol_errors = iswi_counted(&server->protocol_errors);
}
