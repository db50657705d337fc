// SPDX-License-Identifier: Apache-2.0
/* Listening sockets, each with a thread that accepts. */
#define _GNU_SOURCE 1
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "wire/nbd_conn.h"

#define LISTEN_BACKLOG 64
/* Of one host name. */
#define ADDRESSES_MAX 8
/* How long to wait when descriptors or memory have run out. */
#define ACCEPT_RETRY_MS 100

/* Waits until there is something to accept. false: stop. */
static bool wait_for_client(struct iswi_nbd_listener *listener)
{
	struct pollfd pollfds[2] = {
		{.fd = listener->server->stop_fd, .events = POLLIN},
		{.fd = listener->fd, .events = POLLIN},
	};

	while (poll(pollfds, 2, -1) < 0) /* EINTR only: the arguments are right */
		;
	return pollfds[0].revents == 0;
}

static void pause_accepting(struct iswi_nbd_listener *listener)
{
	struct pollfd pollfd = {.fd = listener->server->stop_fd, .events = POLLIN};

	poll(&pollfd, 1, ACCEPT_RETRY_MS);
}

bool iswi_nbd_peer_of(const struct sockaddr_storage *address, unsigned char *peer)
{
	const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)address;
	const struct sockaddr_in *in = (const struct sockaddr_in *)address;
	static const unsigned char loopback[] = {127, 0, 0, 1};

	memset(peer, 0, PEER_BYTES);
	if (address->ss_family != AF_INET && address->ss_family != AF_INET6)
		return false;
	if (address->ss_family == AF_INET6 && !IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr) &&
	    !IN6_IS_ADDR_LOOPBACK(&in6->sin6_addr)) {
		/* A host may use any address of its /64. */
		memcpy(peer, &in6->sin6_addr, PEER_BYTES / 2);
		memcpy(peer + PEER_BYTES / 2, &in6->sin6_scope_id, sizeof(in6->sin6_scope_id));
		return true;
	}
	/* As a socket that listens for both would show it. */
	memset(peer + 10, 0xff, 2);
	if (address->ss_family == AF_INET)
		memcpy(peer + 12, &in->sin_addr, 4);
	else
		memcpy(peer + 12, in6->sin6_addr.s6_addr + 12, 4);
	/* A program of this host may connect from any of millions. */
	if (peer[12] == 127 ||
	    (address->ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&in6->sin6_addr)))
		memcpy(peer + 12, loopback, 4);
	return true;
}

static void *listener_main(void *opaque)
{
	struct iswi_nbd_listener *listener = opaque;

	while (wait_for_client(listener)) {
		struct sockaddr_storage address = {0};
		socklen_t bytes = sizeof(address);
		unsigned char peer[PEER_BYTES];
		int fd = accept4(listener->fd, (struct sockaddr *)&address, &bytes, SOCK_CLOEXEC);

		if (fd >= 0)
			iswi_nbd_server_add(listener->server, fd,
					    iswi_nbd_peer_of(&address, peer) ? peer : NULL);
		else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
			pause_accepting(listener);
	}
	return NULL;
}

/* Takes fd and path. */
static int add_listener(struct iswi_nbd_server *server, int fd, char *path, const char *name)
{
	struct iswi_nbd_listener *listener;
	int err;

	if (server->listener_count == ISWI_NBD_LISTENERS_MAX) {
		err = -EMFILE;
		goto err_fd;
	}
	listener = &server->listeners[server->listener_count];
	listener->server = server;
	listener->fd = fd;
	listener->path = path;
	err = iswi_thread_start(&listener->thread, name, listener_main, listener);
	if (err != 0)
		goto err_fd;
	server->listener_count++;
	return 0;

err_fd:
	close(fd);
	if (path != NULL)
		unlink(path);
	free(path);
	return err;
}

/*
 * The wildcard of IPv6 stands for IPv4 too, whatever net.ipv6.bindv6only says
 * (infiniswap/control/listening.py opens the control port by the same rule).
 */
static bool takes_ipv6_only(const struct addrinfo *address)
{
	const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)address->ai_addr;

	return !IN6_IS_ADDR_UNSPECIFIED(&in6->sin6_addr);
}

/* Returns a descriptor or -errno. */
static int bind_to(const struct addrinfo *address)
{
	const int on = 1;
	int fd = socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, 0);
	int err;

	if (fd < 0)
		return -errno;
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	iswi_page_socket_tune(fd); /* those that are accepted inherit it */
	if (address->ai_family == AF_INET6) {
		const int only = takes_ipv6_only(address);

		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof(only));
	}
	if (bind(fd, address->ai_addr, address->ai_addrlen) == 0 && listen(fd, LISTEN_BACKLOG) == 0)
		return fd;
	err = -errno;
	close(fd);
	return err;
}

static uint16_t bound_port(int fd)
{
	struct sockaddr_storage address;
	socklen_t bytes = sizeof(address);

	if (getsockname(fd, (struct sockaddr *)&address, &bytes) != 0)
		return 0;
	if (address.ss_family == AF_INET6)
		return ntohs(((struct sockaddr_in6 *)&address)->sin6_port);
	return ntohs(((struct sockaddr_in *)&address)->sin_port);
}

static void set_port(struct addrinfo *address, uint16_t port)
{
	for (; address != NULL; address = address->ai_next) {
		if (address->ai_family == AF_INET6)
			((struct sockaddr_in6 *)address->ai_addr)->sin6_port = htons(port);
		else if (address->ai_family == AF_INET)
			((struct sockaddr_in *)address->ai_addr)->sin_port = htons(port);
	}
}

/* The resolver may name one address twice. */
static bool is_before(const struct addrinfo *list, const struct addrinfo *address)
{
	for (; list != address; list = list->ai_next) {
		if (list->ai_addrlen == address->ai_addrlen &&
		    memcmp(list->ai_addr, address->ai_addr, address->ai_addrlen) == 0)
			return true;
	}
	return false;
}

/*
 * Binds one port on every address of this host, because a consumer asks for pages at the address at
 * which it reached the control port. Returns how many, or -errno.
 */
static int bind_all(struct addrinfo *addresses, int *fds)
{
	int count = 0, err = -EADDRNOTAVAIL;

	for (const struct addrinfo *address = addresses; address != NULL;
	     address = address->ai_next) {
		int fd;

		if (is_before(addresses, address))
			continue;
		fd = count < ADDRESSES_MAX ? bind_to(address) : -EMFILE;
		if (fd >= 0) {
			fds[count++] = fd;
			set_port(addresses, bound_port(fd));
			continue;
		}
		err = fd;
		if (fd == -EADDRNOTAVAIL || fd == -EAFNOSUPPORT)
			continue;
		while (count > 0)
			close(fds[--count]);
		return err;
	}
	return count > 0 ? count : err;
}

int iswi_nbd_server_listen_tcp(struct iswi_nbd_server *server, const char *host, uint16_t port,
			       uint16_t *port_out, struct isw_error *error)
{
	const struct addrinfo hints = {
		.ai_socktype = SOCK_STREAM,
		.ai_flags = AI_PASSIVE | AI_NUMERICSERV,
	};
	struct addrinfo *addresses;
	int fds[ADDRESSES_MAX];
	char service[8];
	int count, err;

	err = iswi_nbd_workers_start(server, error);
	if (err != 0)
		return err;
	snprintf(service, sizeof(service), "%u", port);
	err = getaddrinfo(host, service, &hints, &addresses);
	if (err != 0)
		return iswi_error(error, -EADDRNOTAVAIL,
				  "cannot listen on %s: %s; give an address of this host", host,
				  gai_strerror(err));
	count = bind_all(addresses, fds);
	freeaddrinfo(addresses);
	if (count < 0)
		return iswi_error(error, count, "cannot listen on %s port %u: %s", host, port,
				  strerror(-count));
	*port_out = bound_port(fds[0]);
	for (int i = 0; i < count; i++) {
		if (err == 0)
			err = add_listener(server, fds[i], NULL, "isw-nbd-listen");
		else
			close(fds[i]);
	}
	if (err != 0)
		return iswi_error(error, err, "cannot serve %s port %u: %s", host, port,
				  strerror(-err));
	return 0;
}

/* Removes a socket on which nobody listens. */
static int clear_stale(int fd, const struct sockaddr_un *address)
{
	struct stat status;

	if (lstat(address->sun_path, &status) != 0)
		return errno == ENOENT ? 0 : -errno;
	if (!S_ISSOCK(status.st_mode))
		return -EEXIST;
	if (connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0)
		return -EADDRINUSE;
	if (errno != ECONNREFUSED)
		return -errno;
	return unlink(address->sun_path) == 0 ? 0 : -errno;
}

static int bind_unix(const struct sockaddr_un *address)
{
	int probe, fd, err;

	probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (probe < 0)
		return -errno;
	err = clear_stale(probe, address);
	close(probe);
	if (err != 0)
		return err;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	/* The mode of the unbound socket is the one its name gets: never open to others. */
	if (fchmod(fd, 0600) == 0 &&
	    bind(fd, (const struct sockaddr *)address, sizeof(*address)) == 0) {
		if (listen(fd, LISTEN_BACKLOG) == 0)
			return fd;
		err = -errno;
		unlink(address->sun_path);
	} else {
		err = -errno;
	}
	close(fd);
	return err;
}

int iswi_nbd_server_listen_unix(struct iswi_nbd_server *server, const char *path,
				struct isw_error *error)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	char *copy;
	int fd, err;

	if (path[0] == '\0' || strlen(path) >= sizeof(address.sun_path))
		return iswi_error(error, -ENAMETOOLONG,
				  "a socket's path has 1 to %zu bytes; this is not one: %s",
				  sizeof(address.sun_path) - 1, path);
	strcpy(address.sun_path, path);
	err = iswi_nbd_workers_start(server, error);
	if (err != 0)
		return err;
	copy = strdup(path);
	if (copy == NULL)
		return iswi_error(error, -ENOMEM, "no memory for the socket %s", path);
	fd = bind_unix(&address);
	if (fd < 0) {
		free(copy);
		return iswi_error(error, fd, "cannot listen on the socket %s: %s", path,
				  strerror(-fd));
	}
	err = add_listener(server, fd, copy, "isw-nbd-listen");
	if (err != 0)
		return iswi_error(error, err, "cannot serve the socket %s: %s", path,
				  strerror(-err));
	return 0;
}

void iswi_nbd_server_unlisten(struct iswi_nbd_server *server)
{
	uint64_t one = 1;
	ssize_t done = write(server->stop_fd, &one, sizeof(one));

	(void)done; /* cannot be refused: the counter is far from its end */
	for (uint32_t i = 0; i < server->listener_count; i++) {
		struct iswi_nbd_listener *listener = &server->listeners[i];

		pthread_join(listener->thread, NULL);
		close(listener->fd);
		if (listener->path != NULL)
			unlink(listener->path);
		free(listener->path);
	}
	server->listener_count = 0;
}
