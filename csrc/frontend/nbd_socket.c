// SPDX-License-Identifier: Apache-2.0
/*
 * The front ends that speak NBD. nbd-socket: on a Unix socket, for qemu, fio, nbdcopy and tests.
 * nbd: with the kernel's client, on sockets that somebody else gives to both.
 * The server core receives and answers; this file lends it request buffers and passes requests
 * to the engine. All buffers are made before the socket is: a connection that has its share of them
 * (nbd_share.h) waits until one comes back, and with it the client. (The kernel's client is told
 * not to have more requests under way than there are buffers, so it needs no shares: reads never
 * wait behind writes that wait.)
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "engine/request.h"
#include "frontend/nbd_share.h"
#include "frontend/nbd_socket.h"
#include "util/util.h"
#include "wire/nbd.h"
#include "wire/nbd_server.h"

#define CONNECTIONS_MAX 16u
/* Some at a time, and their dead predecessors whose requests have not ended yet. */
#define KERNEL_CONNECTIONS_MAX 64u
#define HANDSHAKE_MS_MAX       5000u
#define SEND_MS_MAX            30000u
/* All request buffers together; at least REQUESTS_MIN of them, whatever their size. */
#define BUFFER_BYTES_MAX (64u << 20)
#define REQUESTS_MIN     4u

struct socket_request {
	struct iswi_nbd_request nbd;
	struct iswi_req req;
};

struct nbd_socket {
	struct isw_frontend frontend; /* first */
	isw_engine *engine;
	struct iswi_nbd_server *server;
	struct socket_request *requests;
	char *buffers;
	struct iswi_nbd_share share;
	bool for_kernel;
	uint32_t request_bytes_max;
	atomic_uint connections; /* relaxed; for_kernel: those that serve */
};

static int socket_open(void *ctx, const char *name, size_t name_bytes, struct iswi_nbd_conn *conn,
		       struct iswi_nbd_export *export_out)
{
	struct nbd_socket *socket = ctx;

	(void)name;
	if (name_bytes != 0) /* there is one device here, the default export */
		return -ENOENT;
	export_out->size_bytes = iswi_engine_size_bytes(socket->engine);
	export_out->block_bytes_min = ISW_PAGE_BYTES;
	export_out->block_bytes_preferred = ISW_PAGE_BYTES;
	export_out->block_bytes_max =
		ISWI_MIN(socket->request_bytes_max, ISWI_NBD_PAYLOAD_BYTES_MAX);
	export_out->handle = conn == NULL ? NULL : iswi_nbd_share_join(&socket->share);
	return 0;
}

/*
 * The kernel is to be given another connection at once, not when a disk that hangs has let go of
 * what this one has under way.
 */
static void socket_ending(void *ctx, struct iswi_nbd_export *export)
{
	struct nbd_socket *socket = ctx;

	(void)export;
	if (!socket->for_kernel)
		return;
	atomic_fetch_sub_explicit(&socket->connections, 1, memory_order_relaxed);
	iswi_engine_connection_lost(socket->engine);
}

static void socket_close(void *ctx, struct iswi_nbd_export *export, struct iswi_nbd_conn *conn)
{
	(void)ctx;
	(void)conn;
	iswi_nbd_share_leave(export->handle);
}

static struct iswi_nbd_request *socket_take(struct iswi_nbd_export *export)
{
	return iswi_nbd_share_take(export->handle);
}

static void socket_give(struct iswi_nbd_export *export, struct iswi_nbd_request *request)
{
	iswi_nbd_share_give(export->handle, request);
}

static bool socket_crowds(struct iswi_nbd_export *export)
{
	return iswi_nbd_share_exceeded(export->handle);
}

static void request_done(struct iswi_req *req, int error)
{
	struct socket_request *request = ISWI_CONTAINER(req, struct socket_request, req);

	iswi_nbd_complete(&request->nbd, error);
}

static enum iswi_req_op op_of(uint16_t command)
{
	switch (command) {
	case NBD_CMD_READ:
		return ISWI_READ;
	case NBD_CMD_WRITE:
		return ISWI_WRITE;
	case NBD_CMD_TRIM:
		return ISWI_TRIM;
	case NBD_CMD_WRITE_ZEROES:
		return ISWI_ZERO;
	default: /* the server lets nothing else through */
		return ISWI_FLUSH;
	}
}

static void socket_submit(struct iswi_nbd_export *export, struct iswi_nbd_request *nbd)
{
	struct iswi_nbd_client *client = export->handle;
	struct nbd_socket *socket = ISWI_CONTAINER(client->share, struct nbd_socket, share);
	struct socket_request *request = ISWI_CONTAINER(nbd, struct socket_request, nbd);
	struct iswi_req *req = &request->req;

	req->op = op_of(nbd->command);
	req->flags = (nbd->flags & NBD_CMD_FLAG_FUA) != 0 ? ISWI_REQ_FUA : 0;
	/* A flush has no range; clients are not held to sending zeros. */
	req->offset = req->op == ISWI_FLUSH ? 0 : nbd->offset;
	req->length = req->op == ISWI_FLUSH ? 0 : nbd->length;
	req->data = nbd->data;
	req->done = request_done;
	iswi_engine_submit(socket->engine, req);
}

static const struct iswi_nbd_backend socket_backend = {
	.listed = "",
	.open = socket_open,
	.ending = socket_ending,
	.close = socket_close,
	.take = socket_take,
	.submit = socket_submit,
	.give = socket_give,
	.crowds = socket_crowds,
};

static uint32_t connections_max(bool for_kernel)
{
	return for_kernel ? KERNEL_CONNECTIONS_MAX : CONNECTIONS_MAX;
}

static int make_requests(struct nbd_socket *socket)
{
	const size_t each = socket->request_bytes_max;
	const bool for_kernel = socket->for_kernel;
	/* More would only be refused by the engine. */
	uint32_t count = iswi_engine_requests_max(socket->engine);
	void *buffers;
	int err;

	/* Clients of a socket that anybody may have opened get a bounded lot; the kernel gets all.
	 */
	if (!for_kernel)
		count = ISWI_MIN(count, ISWI_MAX(BUFFER_BYTES_MAX / (uint32_t)each, REQUESTS_MIN));
	socket->requests = calloc(count, sizeof(*socket->requests));
	if (socket->requests == NULL)
		return -ENOMEM;
	err = -posix_memalign(&buffers, ISW_PAGE_BYTES, count * each);
	if (err != 0)
		goto err_requests;
	err = iswi_nbd_share_init(&socket->share, connections_max(for_kernel), count, !for_kernel);
	if (err != 0)
		goto err_buffers;
	memset(buffers, 0, count * each); /* present now, not at the first request */
	(void)madvise(buffers, count * each, MADV_DONTDUMP); /* pages in clear */
	socket->buffers = buffers;
	for (uint32_t i = 0; i < count; i++) {
		socket->requests[i].nbd.data = socket->buffers + i * each;
		iswi_nbd_share_add(&socket->share, &socket->requests[i].nbd);
	}
	return 0;

err_buffers:
	free(buffers);
err_requests:
	free(socket->requests);
	return err;
}

static void socket_free(struct nbd_socket *socket)
{
	iswi_nbd_share_fini(&socket->share);
	free(socket->buffers);
	free(socket->requests);
	free(socket);
}

/* The server's end waits for each connection, and a connection for each of its requests. */
static void socket_destroy(isw_frontend *frontend)
{
	struct nbd_socket *socket = ISWI_CONTAINER(frontend, struct nbd_socket, frontend);

	iswi_nbd_server_destroy(socket->server);
	socket_free(socket);
}

static int socket_alloc(isw_engine *engine, bool for_kernel, uint32_t request_bytes_max,
			struct nbd_socket **socket_out)
{
	struct nbd_socket *socket = calloc(1, sizeof(*socket));
	int err;

	if (socket == NULL)
		return -ENOMEM;
	socket->engine = engine;
	socket->for_kernel = for_kernel;
	socket->request_bytes_max =
		ISWI_MIN(request_bytes_max, iswi_engine_request_bytes_max(engine));
	err = make_requests(socket);
	if (err != 0) {
		free(socket);
		return err;
	}
	*socket_out = socket;
	return 0;
}

static int socket_create(isw_engine *engine, bool for_kernel, uint32_t request_bytes_max,
			 struct nbd_socket **socket_out, struct isw_error *error)
{
	struct iswi_nbd_server_config config = {
		.backend = &socket_backend,
		.connections_max = connections_max(for_kernel),
		.handshake_ms_max = HANDSHAKE_MS_MAX,
		.fenced = for_kernel,
		.urgent = true,
		.send_ms_max = SEND_MS_MAX,
	};
	struct nbd_socket *socket;
	int err = socket_alloc(engine, for_kernel, request_bytes_max, &socket);

	if (err != 0)
		return iswi_error(error, err, "the front end could not be set up: %s",
				  strerror(-err));
	socket->frontend.ops = for_kernel ? &iswi_nbd_ops : &iswi_nbd_socket_ops;
	config.ctx = socket;
	err = iswi_nbd_server_create(&config, &socket->server, error);
	if (err != 0) {
		socket_free(socket);
		return err;
	}
	*socket_out = socket;
	return 0;
}

static int socket_start(isw_engine *engine, const struct isw_frontend_config *config,
			isw_frontend **frontend_out, struct isw_error *error)
{
	struct nbd_socket *socket;
	int err = socket_create(engine, false, UINT32_MAX, &socket, error);

	if (err != 0)
		return err;
	err = iswi_nbd_server_listen_unix(socket->server, config->path, error);
	if (err != 0) {
		socket_destroy(&socket->frontend);
		return err;
	}
	*frontend_out = &socket->frontend;
	return 0;
}

static int kernel_start(isw_engine *engine, const struct isw_frontend_config *config,
			isw_frontend **frontend_out, struct isw_error *error)
{
	struct nbd_socket *socket;
	int err = socket_create(engine, true, config->request_bytes_max, &socket, error);

	if (err == 0)
		*frontend_out = &socket->frontend;
	return err;
}

static int kernel_serve(isw_frontend *frontend, int32_t fd, struct isw_error *error)
{
	struct nbd_socket *socket = ISWI_CONTAINER(frontend, struct nbd_socket, frontend);
	int own = fcntl(fd, F_DUPFD_CLOEXEC, 0), err;

	if (own < 0)
		return iswi_error(error, -errno, "the socket cannot be served: %s",
				  strerror(errno));
	/* Counted here: who asks next must not take it for one that is lost. */
	atomic_fetch_add_explicit(&socket->connections, 1, memory_order_relaxed);
	err = iswi_nbd_server_connected(socket->server, own, error);
	if (err != 0)
		atomic_fetch_sub_explicit(&socket->connections, 1, memory_order_relaxed);
	return err;
}

static void socket_info(const isw_frontend *frontend, struct isw_frontend_info *info_out)
{
	const struct nbd_socket *socket =
		ISWI_CONTAINER(frontend, const struct nbd_socket, frontend);

	info_out->size_bytes = iswi_engine_size_bytes(socket->engine);
	info_out->requests_max = socket->share.count;
	info_out->connections = atomic_load_explicit(&socket->connections, memory_order_relaxed);
}

const struct iswi_frontend_ops iswi_nbd_socket_ops = {
	.name = "nbd-socket",
	.start = socket_start,
	.destroy = socket_destroy,
	.info = socket_info,
};

const struct iswi_frontend_ops iswi_nbd_ops = {
	.name = "nbd",
	.start = kernel_start,
	.destroy = socket_destroy,
	.info = socket_info,
	.serve = kernel_serve,
};
