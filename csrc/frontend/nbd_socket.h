/* SPDX-License-Identifier: Apache-2.0 */
/* The front ends that speak NBD: with the kernel's client, and on a Unix socket. */
#ifndef ISWI_NBD_SOCKET_H
#define ISWI_NBD_SOCKET_H

#include "frontend/frontend.h"

extern const struct iswi_frontend_ops iswi_nbd_ops;
extern const struct iswi_frontend_ops iswi_nbd_socket_ops;

#endif
